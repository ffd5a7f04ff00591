"""Bytes of the tensors that a micro-batch's forward pass keeps for its backward pass, on one rank.

Follows the modules of `model/layer_specs.py` term by term; the tests compare each with the tensors that autograd saves.
Legend: T tokens of this context-parallel rank, S tokens of this rank where sequence parallelism splits them (else T),
b bytes of the model's dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.planning.model_state import FP32
from megatron_bapo.planning.parameters import ChunkShape

INDEX = 8
"""Bytes of an index: int64."""
Terms = Counter[str]
"""Bytes by part of the model."""


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as a rank sees it."""

    lengths: tuple[int, ...]
    """Tokens of its sequences on all context-parallel ranks together, padding included."""
    dtype_bytes: int
    fused_norms: bool
    """Norms keep their input alone, as torch's kernel for GPUs does; else an fp32 copy of it and of the result."""
    expert_imbalance: float = 1.0
    """Tokens of the busiest rank's experts over the mean."""
    fused_attention: bool = False
    """Transformer Engine's, which reads keys and values where they are, and rotary angles from one table."""
    product_input_bytes: int | None = None
    """Of what products with weights keep of their input; by default `dtype_bytes`, in FP8 1."""

    @property
    def input_bytes(self) -> int:
        return self.dtype_bytes if self.product_input_bytes is None else self.product_input_bytes

    def tokens(self, parallel: ParallelConfig) -> int:
        """T"""
        return sum(self.lengths) // parallel.context_parallel_size

    def split_tokens(self, parallel: ParallelConfig) -> int:
        """S"""
        tp = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        return self.tokens(parallel) // tp


def chunk_activations(
    architecture: Architecture, parallel: ParallelConfig, chunk: ChunkShape, batch: MicroBatch
) -> Terms:
    """Of one model chunk and one micro-batch, under the layout's recompute settings."""
    terms: Terms = Counter()
    tokens, split = batch.tokens(parallel), batch.split_tokens(parallel)
    if chunk.has_embedding:
        terms["embedding"] += tokens * INDEX
    num_moe = len(architecture.moe_layers.intersection(chunk.layers))
    for has_experts, count in (False, len(chunk.layers) - num_moe), (True, num_moe):
        if count:
            of_layer = layer_activations(architecture, parallel, batch, has_experts=has_experts)
            terms += Counter({name: count * num_bytes for name, num_bytes in of_layer.items()})
    if parallel.recompute_granularity == "full":
        terms["rotary angles"] += tokens * architecture.head_dim * FP32
    if chunk.has_output:
        terms["norms"] += _norm(split, architecture.hidden_size, batch)
    return terms


def layer_activations(
    architecture: Architecture, parallel: ParallelConfig, batch: MicroBatch, *, has_experts: bool
) -> Terms:
    """Of one layer, under the layout's recompute settings."""
    hidden = batch.split_tokens(parallel) * architecture.hidden_size * batch.dtype_bytes
    if parallel.recompute_granularity == "full":
        return Counter({"layer inputs": hidden})
    modules = parallel.recompute_modules if parallel.recompute_granularity == "selective" else ()
    terms = _attention(architecture, parallel, batch, recompute="core_attn" in modules)
    terms["norms"] += _norm(batch.split_tokens(parallel), architecture.hidden_size, batch)
    if ("moe" if has_experts else "mlp") in modules:
        terms["layer inputs"] += hidden
    elif has_experts:
        terms += _experts(architecture, parallel, batch)
    else:
        elements, b = _mlp_elements(architecture, parallel, batch), batch.dtype_bytes
        terms["mlp"] += hidden // b * batch.input_bytes + elements * (4 * b + batch.input_bytes)
    return terms


def without_recompute(parallel: ParallelConfig) -> ParallelConfig:
    """What a layer holds while its backward pass runs."""
    return parallel.model_copy(update={"recompute_granularity": None})


def output_layer_bytes(
    architecture: Architecture, parallel: ParallelConfig, batch: MicroBatch, chunk_size: int
) -> tuple[int, int]:
    """(kept until the backward pass, most that is needed besides) by the log-probs and their gradients.

    `model/vocab_parallel.py` computes a chunk of tokens at a time: its logits and exponentials in fp32 and their
    gradient, and the weight's gradient in fp32 before it is rounded.
    """
    tokens, b = batch.tokens(parallel), batch.dtype_bytes
    tp = parallel.tensor_model_parallel_size
    rows = architecture.padded_vocab_size(tp) // tp
    hidden, weight = tokens * architecture.hidden_size * b, rows * architecture.hidden_size
    logits = min(chunk_size, tokens) * rows
    rounded = b != FP32
    workspace = 2 * logits * FP32 + weight * FP32 + rounded * (logits + weight) * b
    gathered = hidden * (1 + parallel.sequence_parallel)  # of the tensor-parallel ranks' tokens; of those with a label
    return hidden + weight * b, workspace + gathered


def _norm(rows: int, width: int, batch: MicroBatch) -> int:
    """Input, what is kept of the result, and a factor for each row."""
    kept = batch.dtype_bytes if batch.fused_norms else 2 * FP32
    return rows * width * kept + rows * FP32


def _attention(arch: Architecture, parallel: ParallelConfig, batch: MicroBatch, *, recompute: bool) -> Terms:
    tp, b = parallel.tensor_model_parallel_size, batch.dtype_bytes
    tokens, split, d = batch.tokens(parallel), batch.split_tokens(parallel), arch.head_dim
    heads, groups = arch.num_attention_heads // tp, max(1, arch.num_key_value_heads // tp)
    # With more tensor-parallel ranks than key/value heads, each gathers the projections of all.
    gathered = tp if arch.num_key_value_heads < tp else 1
    projection = tokens * (arch.num_attention_heads + 2 * arch.num_key_value_heads) // tp * gathered * d * b
    query, key = tokens * heads * d * b, tokens * groups * d * b
    terms: Terms = Counter()
    terms["norms"] += _norm(split, arch.hidden_size, batch)
    terms["attention projections"] += split * arch.hidden_size * batch.input_bytes
    terms["rotary angles"] += 0 if batch.fused_attention else 4 * tokens * d * b
    keeps_projection = recompute  # as a whole, wherever something keeps a part of it that is no copy
    if arch.family.qk_norm:
        factors = tokens * (heads + groups) * FP32
        if batch.fused_norms:
            terms["norms"] += factors  # their inputs are parts of the projection's output
            keeps_projection = True
        else:
            terms["norms"] += factors + 2 * tokens * (heads + groups) * d * FP32
            if b == FP32:  # the key's input is no copy, but part of the projection's output
                terms["norms"] -= tokens * groups * d * FP32
                keeps_projection = True
    context = tokens * heads * d * b
    if batch.fused_attention:
        # What the output projection keeps is the kernel's output, unless it rounds it to FP8.
        rounded = tokens * heads * d * batch.input_bytes if batch.input_bytes != b else 0
        factors = 0 if recompute else tokens * heads * FP32
        terms["attention kernel"] += query + 2 * key + context + rounded + factors
    elif recompute:
        terms["attention kernel"] += query + key + context
    else:
        cp = parallel.context_parallel_size
        copies = heads != groups or cp > 1
        keys = tokens * cp * heads * d * b if copies else key
        values = keys if copies else 0
        keeps_projection |= not copies
        terms["attention kernel"] += query + keys + values + 2 * context + tokens * heads * FP32
        if cp > 1:  # besides, what was gathered, before it is repeated
            terms["attention kernel"] += 2 * key * cp + _mask_elements(batch.lengths, parallel) * b
    terms["attention projections"] += projection * keeps_projection
    return terms


def _mask_elements(lengths: Sequence[int], parallel: ParallelConfig) -> int:
    """Which keys every query of this rank sees, as something to add to their scores."""
    return sum(length * length for length in lengths) // parallel.context_parallel_size


def _mlp_elements(architecture: Architecture, parallel: ParallelConfig, batch: MicroBatch) -> int:
    """Of the gate; the up projection has as many."""
    return batch.tokens(parallel) * architecture.intermediate_size // parallel.tensor_model_parallel_size


def _experts(arch: Architecture, parallel: ParallelConfig, batch: MicroBatch) -> Terms:
    """Router, the permutation, and the experts' own MLPs on the tokens that come to this rank."""
    split, b, chosen = batch.split_tokens(parallel), batch.dtype_bytes, arch.num_experts_per_tok
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    received = int(split * chosen * expert_tp * batch.expert_imbalance)
    mlp = received * arch.moe_intermediate_size // expert_tp
    return Counter(
        {
            "router": split * arch.hidden_size * b
            + split * (chosen * (2 * INDEX + FP32) + arch.num_experts * (1 + FP32)),
            # Gate and up, then four steps from them to the second projection's input, and each token's weight.
            "experts": received * arch.hidden_size * batch.input_bytes
            + mlp * (5 * b + batch.input_bytes)
            + received * FP32,
        }
    )
