"""Which parameters a pipeline stage holds, and how large each is on one of its ranks.

Counts alone, in the order in which Megatron registers parameters: its gradient buffers are laid out by it. Whole
tensors and their Hugging Face names are `model/hf_mapping.py`'s; the tests compare both with built models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import ParallelConfig


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    """Megatron's, with the whole model's layer and expert numbers; experts count from 0 on each rank."""
    numel: int
    """Elements on one rank."""
    is_expert: bool = False
    """Summed over the ranks with the same experts instead of all data- and context-parallel ranks."""
    shares_embedding: bool = False
    """Tied embedding and output layer on different pipeline stages: each has a gradient bucket of its own."""


@dataclass(frozen=True)
class ChunkShape:
    """Consecutive layers of the model on one pipeline stage; an interleaved pipeline's stage has several."""

    layers: range
    has_embedding: bool
    has_output: bool


def stage_chunks(architecture: Architecture, parallel: ParallelConfig, stage: int) -> list[ChunkShape]:
    """The chunks of a pipeline stage, in the order of the model."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    size = architecture.num_hidden_layers // (pp * vpp)
    firsts = [(chunk * pp + stage) * size for chunk in range(vpp)]
    return [
        ChunkShape(range(first, first + size), first == 0, first + size == architecture.num_hidden_layers)
        for first in firsts
    ]


@dataclass(frozen=True)
class Split:
    """All that a layout says about the size of a parameter on one rank."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Split:
        return cls(
            tensor=parallel.tensor_model_parallel_size,
            expert=parallel.expert_model_parallel_size,
            expert_tensor=parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size,
            pipeline=parallel.pipeline_model_parallel_size,
        )


@lru_cache(maxsize=32)
def chunk_parameters(architecture: Architecture, split: Split, chunk: ChunkShape) -> tuple[Parameter, ...]:
    """What one rank of the stage holds of a chunk, in Megatron's order."""
    return tuple(_each_parameter(architecture, split, chunk))


def whole_model(architecture: Architecture) -> ChunkShape:
    return ChunkShape(range(architecture.num_hidden_layers), has_embedding=True, has_output=True)


@lru_cache
def num_parameters(architecture: Architecture) -> int:
    """Of the whole model, tied weights once and without padding of the vocabulary."""
    return sum(parameter.numel for parameter in chunk_parameters(architecture, Split(), whole_model(architecture)))


def num_active_parameters(architecture: Architecture) -> int:
    """Those that one token is multiplied with: without the embedding's lookup and the experts it is not sent to."""
    inactive = architecture.num_experts - architecture.num_experts_per_tok
    expert = 3 * architecture.hidden_size * architecture.moe_intermediate_size
    total = num_parameters(architecture) - len(architecture.moe_layers) * inactive * expert
    return total - (0 if architecture.tie_word_embeddings else architecture.vocab_size * architecture.hidden_size)


def _each_parameter(architecture: Architecture, split: Split, chunk: ChunkShape) -> Iterator[Parameter]:
    vocabulary = architecture.padded_vocab_size(split.tensor) // split.tensor * architecture.hidden_size
    spread = architecture.tie_word_embeddings and split.pipeline > 1
    if chunk.has_embedding:
        yield Parameter("embedding.word_embeddings.weight", vocabulary, shares_embedding=spread)
    for layer in chunk.layers:
        yield from _layer_parameters(architecture, split, layer)
    if chunk.has_output:
        yield Parameter("decoder.final_layernorm.weight", architecture.hidden_size)
    if chunk.has_output and (spread or not architecture.tie_word_embeddings):
        yield Parameter("output_layer.weight", vocabulary, shares_embedding=spread)


def _layer_parameters(arch: Architecture, split: Split, layer: int) -> Iterator[Parameter]:
    prefix, tp = f"decoder.layers.{layer}.", split.tensor
    qkv = (arch.num_attention_heads + 2 * arch.num_key_value_heads) * arch.head_dim // tp
    yield Parameter(f"{prefix}input_layernorm.weight", arch.hidden_size)
    proj = arch.hidden_size * arch.num_attention_heads * arch.head_dim // tp
    yield Parameter(f"{prefix}self_attention.linear_proj.weight", proj)
    yield Parameter(f"{prefix}self_attention.linear_qkv.weight", qkv * arch.hidden_size)
    if arch.family.qkv_bias:
        yield Parameter(f"{prefix}self_attention.linear_qkv.bias", qkv)
    if arch.family.qk_norm:
        yield Parameter(f"{prefix}self_attention.q_layernorm.weight", arch.head_dim)
        yield Parameter(f"{prefix}self_attention.k_layernorm.weight", arch.head_dim)
    yield Parameter(f"{prefix}pre_mlp_layernorm.weight", arch.hidden_size)
    if layer not in arch.moe_layers:
        mlp = arch.intermediate_size * arch.hidden_size // tp
        yield Parameter(f"{prefix}mlp.linear_fc1.weight", 2 * mlp)
        yield Parameter(f"{prefix}mlp.linear_fc2.weight", mlp)
        return
    yield Parameter(f"{prefix}mlp.router.weight", arch.num_experts * arch.hidden_size)
    mlp = arch.moe_intermediate_size * arch.hidden_size // split.expert_tensor
    for expert in range(arch.num_experts // split.expert):
        name = f"{prefix}mlp.experts.local_experts.{expert}."
        # Without expert parallelism Megatron sums experts' gradients like any other's.
        yield Parameter(f"{name}linear_fc1.weight", 2 * mlp, is_expert=split.expert > 1)
        yield Parameter(f"{name}linear_fc2.weight", mlp, is_expert=split.expert > 1)
