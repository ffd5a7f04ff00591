"""Parameters of a pipeline stage and their sizes on one of its ranks.

This module holds element counts only, in the order in which Megatron registers parameters, because its gradient buffers
follow that order. `model/hf_mapping.py` has the full shapes and the Hugging Face names; the tests compare both with
built models.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.pipeline_layers import stage_layers
from megatron_bapo.config.schema import ParallelConfig

ROW_PARALLEL = ("linear_proj", "linear_fc2")
"""Linear layers whose inputs tensor parallelism splits; of the others, it splits the outputs."""
WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")
"""Linear layers that every tensor-parallel rank has whole."""
REPLICATED = (
    *("layernorm.weight", "router.weight", "router.bias", "linear_proj.bias", "gate_weight"),
    *(f"{name}.weight" for name in WHOLE),
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a pipeline stage."""

    name: str
    """Megatron's name, without the decoder layer's in front; experts are numbered from 0 on each rank."""
    numel: int
    """Elements on one rank."""
    is_expert: bool = False
    """True if gradients are summed over the ranks with the same experts, not all data- and context-parallel ranks."""
    shares_embedding: bool = False
    """True for tied embeddings on different pipeline stages: each copy has its own gradient bucket."""
    is_trained: bool = True
    """False for weights that are frozen because the model has adapters, and for routers' biases."""
    in_fp32: bool = False
    """True if the parameter is in fp32 whatever the model's dtype."""

    @property
    def is_replicated(self) -> bool:
        """True if every tensor-parallel rank has all of it, so that sequence parallelism sums its gradients."""
        linear, _, half = self.name.partition(".adapter.")
        if ".local_experts." in self.name:
            return False
        if half:
            return linear.endswith(WHOLE) or linear.endswith(ROW_PARALLEL) == (half == "lora_B")
        return self.name.endswith(REPLICATED)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Sizes on one rank of the adapter of one linear layer."""

    linear: str
    """Megatron's name of the linear layer, without the decoder layer's in front."""
    num_parts: int
    """Hugging Face modules with an adapter that the linear layer fuses; each has its own A."""
    numel_A: int
    """Elements of all A, num_parts x rank x inputs."""
    numel_B: int
    """Elements of B, outputs x rank."""

    @property
    def is_row_parallel(self) -> bool:
        """True if tensor parallelism splits the inputs, and with them A, instead of the outputs and B."""
        return self.linear.endswith(ROW_PARALLEL)

    @property
    def is_whole(self) -> bool:
        """True if every tensor-parallel rank has all of the linear layer."""
        return self.linear.endswith(WHOLE)

    @property
    def is_of_expert(self) -> bool:
        return ".local_experts." in self.linear


@dataclass(frozen=True)
class ChunkShape:
    """Consecutive layers on one pipeline stage; a stage of an interleaved pipeline has several chunks."""

    layers: range
    has_embedding: bool
    has_output: bool


def stage_chunks(architecture: Architecture, parallel: ParallelConfig, stage: int) -> tuple[ChunkShape, ...]:
    """Return the chunks of a pipeline stage in model order."""
    last = architecture.num_hidden_layers
    return tuple(
        ChunkShape(layers, layers.start == 0, layers.stop == last)
        for layers in stage_layers(architecture, parallel, stage)
    )


@dataclass(frozen=True)
class Split:
    """Parallel sizes that determine the size of a parameter on one rank."""

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


@dataclass(frozen=True)
class LayerKind:
    """What a decoder layer consists of."""

    has_experts: bool = False
    """True for a mixture of experts, false for one MLP."""
    has_delta_net: bool = False
    """True for a Gated DeltaNet, false for attention."""


def layer_kinds(architecture: Architecture, layers: Iterable[int]) -> Counter[LayerKind]:
    """Return how many of the layers are of each kind."""
    return Counter(_layer_kind(architecture, layer) for layer in layers)


def _layer_kind(architecture: Architecture, layer: int) -> LayerKind:
    return LayerKind(layer in architecture.moe_layers, layer in architecture.linear_layers)


@lru_cache(maxsize=32)
def chunk_parameters(
    architecture: Architecture, split: Split, chunk: ChunkShape, lora: LoraConfig | None = None
) -> tuple[Parameter, ...]:
    """Return the parameters of a chunk on one rank of the stage, adapters included, in Megatron's order."""
    hashable: Any = lora
    layers = (_layer(architecture, split, _layer_kind(architecture, layer), hashable) for layer in chunk.layers)
    before, after = _outside_layers(architecture, split, chunk, is_trained=lora is None)
    return (*before, *chain.from_iterable(layers), *after)


@lru_cache
def layer_adapters(architecture: Architecture, split: Split, kind: LayerKind, lora: LoraConfig) -> tuple[Adapter, ...]:
    """Return the adapters of a decoder layer on one rank."""
    hashable: Any = lora
    halves: dict[str, list[Parameter]] = defaultdict(list)
    for parameter in _layer(architecture, split, kind, hashable):
        linear, is_adapter, _ = parameter.name.partition(".adapter.")
        if is_adapter:
            halves[linear].append(parameter)
    return tuple(Adapter(linear, len(a), sum(p.numel for p in a), b.numel) for linear, (*a, b) in halves.items())


def whole_model(architecture: Architecture) -> ChunkShape:
    return ChunkShape(range(architecture.num_hidden_layers), has_embedding=True, has_output=True)


@dataclass(frozen=True)
class Elements:
    """Elements of the parameters of chunks on one rank."""

    dense: int
    """Trained, `Parameter.is_expert` is false."""
    experts: int
    """Trained, `Parameter.is_expert` is true."""
    frozen: int
    """Neither trained nor in fp32."""
    in_fp32: int
    matrices: int
    """Linear weights that FP8 applies to, trained or not; the MoE router is excluded."""

    @property
    def trained(self) -> int:
        return self.dense + self.experts

    @property
    def total(self) -> int:
        return self.trained + self.frozen + self.in_fp32


def _is_matrix(name: str) -> bool:
    return name.endswith(("in_proj.weight", "out_proj.weight")) or (".linear_" in name and name.endswith(".weight"))


@lru_cache(maxsize=4096)
def count_elements(
    architecture: Architecture, split: Split, chunks: tuple[ChunkShape, ...], lora: LoraConfig | None = None
) -> Elements:
    """Return the elements of the parameters of chunks on one rank, adapters included."""
    hashable: Any = lora
    parameters = [p for chunk in chunks for p in chunk_parameters(architecture, split, chunk, hashable)]
    trained = [p for p in parameters if p.is_trained]
    return Elements(
        dense=sum(p.numel for p in trained if not p.is_expert),
        experts=sum(p.numel for p in trained if p.is_expert),
        frozen=sum(p.numel for p in parameters if not (p.is_trained or p.in_fp32)),
        in_fp32=sum(p.numel for p in parameters if p.in_fp32),
        matrices=sum(p.numel for p in parameters if _is_matrix(p.name)),
    )


@lru_cache
def num_parameters(architecture: Architecture) -> int:
    """Return the whole model's parameter count; tied weights count once.

    Padding of the vocabulary and routers' biases, which are not trained, do not count.
    """
    return count_elements(architecture, Split(), (whole_model(architecture),)).trained


def num_trained_parameters(architecture: Architecture, lora: LoraConfig | None) -> int:
    """Return the whole model's number of parameters that the optimizer updates."""
    hashable: Any = lora
    return count_elements(architecture, Split(), (whole_model(architecture),), hashable).trained


def num_active_parameters(architecture: Architecture) -> int:
    """Return the parameters that one token is multiplied with.

    These exclude the embedding lookup and the experts that the token is not routed to.
    """
    inactive = architecture.num_experts - architecture.num_experts_per_tok
    hidden, width = architecture.hidden_size, architecture.moe_intermediate_size
    expert = 3 * hidden * width + (2 * width + hidden) * architecture.family.linear_biases
    total = num_parameters(architecture) - len(architecture.moe_layers) * inactive * expert
    return total - (0 if architecture.tie_word_embeddings else architecture.vocab_size * architecture.hidden_size)


def num_active_adapter_parameters(architecture: Architecture, lora: LoraConfig) -> int:
    """Return the adapters' parameters that one token is multiplied with, without experts that it is not routed to.

    The adapter of a fused layer, such as Megatron's QKV, has rows for all of its parts.
    """
    inactive = architecture.num_experts - architecture.num_experts_per_tok
    expert = _mlp("", architecture.hidden_size, architecture.moe_intermediate_size, lora)
    adapters = sum(parameter.numel for parameter in expert if ".adapter." in parameter.name)
    return num_trained_parameters(architecture, lora) - len(architecture.moe_layers) * inactive * adapters


def _outside_layers(
    architecture: Architecture, split: Split, chunk: ChunkShape, *, is_trained: bool
) -> tuple[list[Parameter], list[Parameter]]:
    """Return a chunk's parameters (before its layers, behind them)."""
    vocabulary = architecture.padded_vocab_size(split.tensor) // split.tensor * architecture.hidden_size
    spread = architecture.tie_word_embeddings and split.pipeline > 1
    before, after = [], []
    if chunk.has_embedding:
        name = "embedding.word_embeddings.weight"
        before.append(Parameter(name, vocabulary, shares_embedding=spread, is_trained=is_trained))
    if chunk.has_output:
        after.append(Parameter("decoder.final_layernorm.weight", architecture.hidden_size, is_trained=is_trained))
    if chunk.has_output and (spread or not architecture.tie_word_embeddings):
        after.append(Parameter("output_layer.weight", vocabulary, shares_embedding=spread, is_trained=is_trained))
    return before, after


@lru_cache
def _layer(arch: Architecture, split: Split, kind: LayerKind, lora: LoraConfig | None) -> tuple[Parameter, ...]:
    parameters = tuple(_layer_parameters(arch, split, kind, lora))
    if lora is None:
        return parameters
    return tuple(replace(p, is_trained=p.is_trained and ".adapter." in p.name) for p in parameters)


def _layer_parameters(
    arch: Architecture, split: Split, kind: LayerKind, lora: LoraConfig | None
) -> Iterator[Parameter]:
    tp, hidden = split.tensor, arch.hidden_size
    yield Parameter("input_layernorm.weight", hidden)
    if kind.has_delta_net:
        yield from _gated_delta_net("self_attention.", arch, tp)
    else:
        attention = _latent_attention if arch.kv_lora_rank else _grouped_attention
        yield from attention("self_attention.", arch, tp, lora)
    yield Parameter("pre_mlp_layernorm.weight", hidden)
    if not kind.has_experts:
        yield from _mlp("mlp.", hidden, arch.intermediate_size // tp, lora)
        return
    yield Parameter("mlp.router.weight", arch.num_experts * hidden)
    if arch.family.linear_biases:
        yield Parameter("mlp.router.bias", arch.num_experts)
    if arch.family.sigmoid_router:
        yield Parameter("mlp.router.expert_bias", arch.num_experts, is_trained=False, in_fp32=True)
    width = arch.moe_intermediate_size // split.expert_tensor
    for expert in range(arch.num_experts // split.expert):
        # Without expert parallelism Megatron reduces experts' gradients like all others.
        name = f"mlp.experts.local_experts.{expert}."
        yield from _mlp(name, hidden, width, lora, is_expert=split.expert > 1, bias=arch.family.linear_biases)
    if arch.shared_expert_intermediate_size:
        if arch.family.shared_expert_gate:
            yield Parameter("mlp.shared_experts.gate_weight", hidden)
        yield from _mlp("mlp.shared_experts.", hidden, arch.shared_expert_intermediate_size // tp, lora)


def _grouped_attention(name: str, arch: Architecture, tp: int, lora: LoraConfig | None) -> Iterator[Parameter]:
    hidden, heads = arch.hidden_size, arch.num_attention_heads * arch.head_dim // tp
    qkv = arch.qkv_width // tp
    if arch.family.attention_sinks:
        yield Parameter(f"{name}core_attention.softmax_offset", arch.num_attention_heads // tp)
    yield from _linear(f"{name}linear_proj", hidden, heads, ("o_proj",), lora, bias=arch.family.linear_biases)
    parts, bias = ("q_proj", "k_proj", "v_proj"), arch.family.qkv_bias
    yield from _linear(f"{name}linear_qkv", qkv, hidden, parts, lora, bias=bias)
    if arch.family.qk_norm:
        yield Parameter(f"{name}q_layernorm.weight", arch.head_dim)
        yield Parameter(f"{name}k_layernorm.weight", arch.head_dim)


def _gated_delta_net(name: str, arch: Architecture, tp: int) -> Iterator[Parameter]:
    """Yield the parameters of a Gated DeltaNet, whose layers have no adapters.

    Its norm is whole on every tensor-parallel rank, but the ranks sum the norm's gradients in the backward pass.
    """
    hidden, of_heads = arch.hidden_size, arch.linear_num_value_heads // tp
    mixed = arch.linear_mixed_width // tp
    yield Parameter(f"{name}conv1d", mixed * arch.linear_conv_kernel_dim)
    yield Parameter(f"{name}dt_bias", of_heads)
    yield Parameter(f"{name}A_log", of_heads)
    yield Parameter(f"{name}norm", arch.linear_value_head_dim)
    yield Parameter(f"{name}in_proj.weight", arch.linear_in_width // tp * hidden)
    yield Parameter(f"{name}out_proj.weight", hidden * arch.linear_value_width // tp)


def _latent_attention(name: str, arch: Architecture, tp: int, lora: LoraConfig | None) -> Iterator[Parameter]:
    """Yield the parameters of multi-head latent attention, whose down-projections every rank has whole."""
    hidden, heads = arch.hidden_size, arch.num_attention_heads // tp
    queries, q_rank, kv_rank = heads * arch.head_dim, arch.q_lora_rank, arch.kv_lora_rank
    yield from _linear(f"{name}linear_proj", hidden, heads * arch.v_head_dim, ("o_proj",), lora)
    if q_rank:
        yield from _linear(f"{name}linear_q_down_proj", q_rank, hidden, ("q_a_proj",), lora)
        yield from _linear(f"{name}linear_q_up_proj", queries, q_rank, ("q_b_proj",), lora)
    else:
        yield from _linear(f"{name}linear_q_proj", queries, hidden, ("q_proj",), lora)
    yield from _linear(f"{name}linear_kv_down_proj", arch.cached_dim, hidden, ("kv_a_proj_with_mqa",), lora)
    up = heads * (arch.qk_nope_head_dim + arch.v_head_dim)
    yield from _linear(f"{name}linear_kv_up_proj", up, kv_rank, ("kv_b_proj",), lora)
    if q_rank:
        yield Parameter(f"{name}q_layernorm.weight", q_rank)
    yield Parameter(f"{name}kv_layernorm.weight", kv_rank)


def _mlp(
    name: str, hidden: int, width: int, lora: LoraConfig | None, *, is_expert: bool = False, bias: bool = False
) -> Iterator[Parameter]:
    parts = ("gate_proj", "up_proj")
    yield from _linear(f"{name}linear_fc1", 2 * width, hidden, parts, lora, is_expert=is_expert, bias=bias)
    yield from _linear(f"{name}linear_fc2", hidden, width, ("down_proj",), lora, is_expert=is_expert, bias=bias)


def _linear(
    name: str,
    outputs: int,
    inputs: int,
    parts: tuple[str, ...],
    lora: LoraConfig | None,
    *,
    bias: bool = False,
    is_expert: bool = False,
) -> Iterator[Parameter]:
    """Yield the parameters of a linear layer with `parts` fused Hugging Face modules, and of its adapter."""
    yield Parameter(f"{name}.weight", outputs * inputs, is_expert)
    if bias:
        yield Parameter(f"{name}.bias", outputs, is_expert)
    targets = [part for part in parts if lora is not None and part in lora.target_modules]
    if lora is not None and targets:
        for part in targets:
            yield Parameter(f"{name}.adapter.lora_A_{part}", lora.rank * inputs, is_expert)
        yield Parameter(f"{name}.adapter.lora_B", outputs * lora.rank, is_expert)
