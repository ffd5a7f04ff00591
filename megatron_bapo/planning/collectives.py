"""Bytes that one trainer rank sends to others in one update, by the mesh axis that they cross.

They are the bytes of ring algorithms: of n ranks, each sends (n - 1) / n of a tensor in an all-gather or a
reduce-scatter, and twice as much in an all-reduce. A *unit* is such a part of the hidden states of a micro-batch.
Sequence parallelism has an all-gather before each block of a layer and a reduce-scatter behind it; without it there is
one all-reduce behind each block, which sends the same. The backward pass gathers the inputs of the blocks again for the
gradients of the weights (arXiv 2205.05198). The blocks are attention and the dense MLP or shared expert: experts take
the tokens that sequence parallelism gives a rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.planning.activations import MicroBatch
from megatron_bapo.planning.model_state import FP32, data_context_size, expert_data_size
from megatron_bapo.planning.parameters import (
    ChunkShape,
    Split,
    chunk_parameters,
    count_elements,
    layer_adapters,
    layer_kinds,
    stage_chunks,
)
from megatron_bapo.planning.precision import DTYPE_BYTES

OUTPUT_STATISTICS = 4
"""Numbers per response token that tensor-parallel ranks exchange to compute a log-prob (`model/vocab_parallel.py`)."""
BLOCK_UNITS = 2
"""Units that the forward pass of a block sends."""


Amount = TypeVar("Amount", int, float)
"""Tokens and their bytes; a plan's mean micro-batch has a fractional number of tokens."""


def hidden_bytes(architecture: Architecture, tokens: Amount, dtype_bytes: int) -> Amount:
    """Return the bytes of the hidden states of tokens."""
    return tokens * architecture.hidden_size * dtype_bytes


def key_value_bytes(architecture: Architecture, parallel: ParallelConfig, tokens: Amount, dtype_bytes: int) -> Amount:
    """Return the bytes of a layer's keys and values on one tensor-parallel rank."""
    heads = max(1, architecture.num_key_value_heads // parallel.tensor_model_parallel_size)
    return tokens * heads * (architecture.head_dim + architecture.value_dim) * dtype_bytes


def swapped_bytes(architecture: Architecture, tensor_size: int, tokens: Amount, dtype_bytes: int) -> Amount:
    """Return the bytes of what a Gated DeltaNet swaps between heads and tokens: its projected input and its output."""
    return tokens * ((architecture.linear_in_width + architecture.linear_value_width) // tensor_size) * dtype_bytes


def attention_inputs(architecture: Architecture) -> int:
    """Return the width of what sequence parallelism gathers of a token before attention.

    It is the hidden state, or in latent attention the compressed queries, keys and values, and the rotated key.
    """
    hidden = architecture.hidden_size
    return (architecture.q_lora_rank or hidden) + architecture.cached_dim if architecture.kv_lora_rank else hidden


def sent_bytes(
    config: Config, architecture: Architecture, stage: int, batch: MicroBatch, num_micro_batches: int, num_scored: int
) -> Counter[str]:
    """Return the bytes that a rank of a pipeline stage sends in one update, by axis.

    The axes are tensor, context, pipeline, embedding (the first and the last stage, if embeddings are tied), expert,
    data, and expert data, whose ranks share the same experts.
    `num_scored` is the number of forward passes over each micro-batch beside the training pass. Counts the collectives
    of Megatron's `local` layers, without tensor parallelism of experts. The sums of the gradients of the small norms
    in Gated DeltaNets are left out.
    """
    parallel, arch = config.parallel, architecture
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    tokens, b = batch.tokens(parallel), batch.dtype_bytes
    keys = key_value_bytes(arch, parallel, tokens, b) * (cp - 1)
    swapped = swapped_bytes(arch, tp, tokens, b) * (cp - 1) // cp
    hidden = hidden_bytes(arch, batch.split_tokens(parallel), b)
    statistics = OUTPUT_STATISTICS * tokens * FP32 * (tp - 1)
    sent: Counter[str] = Counter()
    lora: Any = config.model.lora
    chunks = stage_chunks(arch, parallel, stage)
    for chunk in chunks:
        forward, backward = _widths(parallel, arch, chunk, lora)
        widths = num_scored * forward + forward + backward
        sent["tensor"] += num_micro_batches * (widths * tokens * b * (tp - 1) // tp)
        if chunk.has_output:
            sent["tensor"] += num_micro_batches * statistics * (num_scored + 1)
        full, linear = parallel.recompute_granularity == "full", len(arch.linear_layers.intersection(chunk.layers))
        again = full or "core_attn" in _modules(parallel)
        sent["context"] += num_micro_batches * (len(chunk.layers) - linear) * keys * (num_scored + 2 + again)
        sent["context"] += num_micro_batches * linear * swapped * (num_scored + 2 + full)
        sent["pipeline"] += (
            num_micro_batches * hidden * ((num_scored + 1) * (not chunk.has_output) + (not chunk.has_embedding))
        )
        layers = len(arch.moe_layers.intersection(chunk.layers))
        again = parallel.recompute_granularity == "full" or "moe" in _modules(parallel)
        sent["expert"] += num_micro_batches * layers * _exchanged(arch, parallel, batch) * (num_scored + 2 + again)
    reduced = DTYPE_BYTES[config.optimizer.grads_dtype]
    gathered = b if parallel.use_distributed_optimizer else reduced
    split = Split.of(parallel)
    own = count_elements(arch, split, chunks, lora)
    for num, name, size in (
        (own.dense, "data", data_context_size(parallel)),
        (own.experts, "expert data", expert_data_size(parallel)),
    ):
        sent[name] = num * (reduced + gathered) * (size - 1) // size
    trained = [p for chunk in chunks for p in chunk_parameters(arch, split, chunk, lora) if p.is_trained]
    sent["embedding"] = sum(p.numel for p in trained if p.shares_embedding) * reduced
    if parallel.sequence_parallel:
        replicated = sum(p.numel for p in trained if p.is_replicated)
        sent["tensor"] += 2 * replicated * reduced * (tp - 1) // tp
    return +sent


def _exchanged(architecture: Architecture, parallel: ParallelConfig, batch: MicroBatch) -> int:
    """Return the bytes that the forward pass of a layer of experts sends: tokens to experts and back, their weights.

    Tokens are spread evenly over experts.
    """
    size = parallel.expert_model_parallel_size
    num_routed = batch.split_tokens(parallel) * architecture.num_experts_per_tok
    row = 2 * architecture.hidden_size * batch.dtype_bytes + FP32
    return num_routed * row * (size - 1) // size


def num_mlps(architecture: Architecture, layers: Sequence[int]) -> tuple[int, int]:
    """Return how many of the layers have (a dense MLP, a shared expert), which tensor parallelism splits."""
    num_moe = len(architecture.moe_layers.intersection(layers))
    return len(layers) - num_moe, num_moe * (architecture.shared_expert_intermediate_size > 0)


def _widths(
    parallel: ParallelConfig, architecture: Architecture, chunk: ChunkShape, lora: LoraConfig | None
) -> tuple[int, int]:
    """Return the elements per token that tensor-parallel ranks exchange in a model chunk's (forward, backward) pass.

    Recomputation is included in the latter. The key that latent attention rotates is not gathered again for gradients,
    and nothing is where weights are frozen.
    """
    hidden, inputs = architecture.hidden_size, attention_inputs(architecture)
    sequence, modules = parallel.sequence_parallel, _modules(parallel)
    dense, shared = num_mlps(architecture, chunk.layers)
    num_layers, num_mlp = len(chunk.layers), dense + shared
    num_attention = num_layers - len(architecture.linear_layers.intersection(chunk.layers))
    forward = num_layers * (inputs + hidden) + num_attention * _gathered_projection(architecture, parallel)
    forward += BLOCK_UNITS * num_mlp * hidden
    again = num_layers * (inputs - architecture.qk_rope_head_dim) + num_mlp * hidden
    recomputed = BLOCK_UNITS * hidden * (dense * ("mlp" in modules) + shared * ("moe" in modules))
    if parallel.recompute_granularity == "full":
        recomputed = forward
    backward = forward + sequence * again * (lora is None) + recomputed
    if lora is not None:
        of_adapters = _adapter_widths(parallel, architecture, chunk, lora)
        forward, backward = forward + of_adapters[0], backward + of_adapters[1]
    if chunk.has_embedding:  # the sum over shards of the vocabulary
        forward, backward = forward + (1 if sequence else 2) * hidden, backward + sequence * hidden * (lora is None)
    if chunk.has_output:  # the gather of the hidden states, and the sum of their gradients
        forward, backward = forward + sequence * hidden, backward + (1 if sequence else 2) * hidden
    return forward, backward


def _adapter_widths(
    parallel: ParallelConfig, architecture: Architecture, chunk: ChunkShape, lora: LoraConfig
) -> tuple[int, int]:
    """Return the elements per token of products with A that ranks exchange in a (forward, backward) pass.

    A pass with sequence parallelism gathers or scatters them. Without it, the forward pass of row-parallel and the
    backward pass of column-parallel layers sum them. Experts and layers that every rank has whole exchange none.
    """
    full, modules = parallel.recompute_granularity == "full", _modules(parallel)
    hashable: Any = lora
    forward = backward = 0
    for kind in layer_kinds(architecture, chunk.layers).elements():
        recomputes_mlp = full or ("moe" if kind.has_experts else "mlp") in modules
        for adapter in layer_adapters(architecture, Split.of(parallel), kind, hashable):
            if adapter.is_whole or adapter.is_of_expert:
                continue
            width = adapter.num_parts * lora.rank
            own = width if parallel.sequence_parallel else 2 * width * adapter.is_row_parallel
            forward += own
            backward += 2 * width - own
            backward += own * (recomputes_mlp if adapter.linear.startswith("mlp.") else full)
    return forward, backward


def _gathered_projection(architecture: Architecture, parallel: ParallelConfig) -> int:
    """Return the width of the queries, keys and values that ranks gather if there are fewer key/value heads than ranks.

    Their gradients are reduced and scattered (megatron/core/transformer/attention.py, get_query_key_value_tensors).
    """
    if architecture.kv_lora_rank or architecture.num_key_value_heads >= parallel.tensor_model_parallel_size:
        return 0
    return architecture.qkv_width


def _modules(parallel: ParallelConfig) -> tuple[str, ...]:
    return parallel.recompute_modules if parallel.recompute_granularity == "selective" else ()
