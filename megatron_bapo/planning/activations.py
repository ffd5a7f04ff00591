"""Activation memory: bytes of the tensors that a forward pass saves for its backward pass, per micro-batch and rank.

The terms follow the modules of `model/layer_specs.py`; the tests compare each with the tensors that autograd saves.
Legend: T tokens of this context-parallel rank, S tokens of this rank where sequence parallelism splits them (else T),
b bytes of the model's dtype.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.padding import width_with_sink
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.planning.delta_net import saved_bytes
from megatron_bapo.planning.model_state import FP32
from megatron_bapo.planning.parameters import Adapter, ChunkShape, LayerKind, Split, layer_adapters, layer_kinds

INDEX = 8
"""Bytes of an int64 index."""
Terms = Counter[str]
"""Bytes for each part of the model."""


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as a rank sees it."""

    lengths: tuple[int, ...]
    """Tokens of each sequence over all context-parallel ranks, padding included."""
    dtype_bytes: int
    fused_norms: bool
    """True where norms save only their input, as torch's GPU kernel does; the others save fp32 copies of input and
    result."""
    expert_imbalance: float = 1.0
    """Ratio of the tokens of the busiest expert-parallel rank to the mean."""
    fused_attention: bool = False
    """True for Transformer Engine's attention, which reads keys and values in place and rotary angles from a table."""
    fused_swiglu: bool = False
    """True on GPUs, where SwiGLU saves only its input, the outputs of the gate and up projections."""
    product_input_bytes: int | None = None
    """Bytes per element of the input that linear layers save: 1 in FP8, `dtype_bytes` by default."""

    @property
    def swiglu_bytes(self) -> int:
        """Bytes that an MLP saves per element of its width, without the second projection's input."""
        return (2 if self.fused_swiglu else 4) * self.dtype_bytes

    @property
    def input_bytes(self) -> int:
        return self.dtype_bytes if self.product_input_bytes is None else self.product_input_bytes

    def tokens(self, parallel: ParallelConfig) -> int:
        """Return T, the tokens of one context-parallel rank."""
        return sum(self.lengths) // parallel.context_parallel_size

    def split_tokens(self, parallel: ParallelConfig) -> int:
        """Return S, the tokens of one rank where sequence parallelism splits them."""
        tp = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        return self.tokens(parallel) // tp


def chunk_activations(
    architecture: Architecture,
    parallel: ParallelConfig,
    chunk: ChunkShape,
    batch: MicroBatch,
    lora: LoraConfig | None = None,
) -> Terms:
    """Return the activation bytes of one model chunk and one micro-batch under the layout's recompute settings."""
    terms: Terms = Counter()
    tokens = batch.tokens(parallel)
    if chunk.has_embedding:
        terms["embedding"] += tokens * INDEX
    for kind, count in layer_kinds(architecture, chunk.layers).items():
        of_layer = layer_activations(architecture, parallel, batch, kind, lora)
        terms += Counter({name: count * num_bytes for name, num_bytes in of_layer.items()})
    if parallel.recompute_granularity == "full":
        terms["rotary angles"] += tokens * architecture.rotary_dim * FP32
    if chunk.has_output:
        terms["norms"] += _hidden_norm(architecture, parallel, batch)
    return terms


def layer_activations(
    architecture: Architecture,
    parallel: ParallelConfig,
    batch: MicroBatch,
    kind: LayerKind,
    lora: LoraConfig | None = None,
) -> Terms:
    """Return the activation bytes of one layer under the layout's recompute settings."""
    hidden = batch.split_tokens(parallel) * architecture.hidden_size * batch.dtype_bytes
    if parallel.recompute_granularity == "full":
        return Counter({"layer inputs": hidden})
    modules = parallel.recompute_modules if parallel.recompute_granularity == "selective" else ()
    attention = _latent_attention if architecture.kv_lora_rank else _attention
    if kind.has_delta_net:
        attention = _gated_delta_net
    terms = attention(architecture, parallel, batch, recompute="core_attn" in modules)
    terms["norms"] += 2 * _hidden_norm(architecture, parallel, batch)
    recomputes_mlp = ("moe" if kind.has_experts else "mlp") in modules
    if lora is not None:
        hashable: Any = lora
        terms["adapters"] += sum(
            _adapter_bytes(adapter, architecture, parallel, batch, lora)
            for adapter in layer_adapters(architecture, Split.of(parallel), kind, hashable)
            if not (recomputes_mlp and adapter.linear.startswith("mlp."))
        )
    if recomputes_mlp:
        terms["layer inputs"] += hidden
    elif kind.has_experts:
        terms += _experts(architecture, parallel, batch)
    else:
        elements, b = _mlp_elements(architecture.intermediate_size, parallel, batch), batch.dtype_bytes
        terms["mlp"] += hidden // b * batch.input_bytes + elements * (batch.swiglu_bytes + batch.input_bytes)
    return terms if lora is None else terms - _unsaved_inputs(architecture, parallel, batch, kind, lora)


def without_recompute(parallel: ParallelConfig) -> ParallelConfig:
    """Return the layout with recomputation off: a layer holds all its activations while its backward pass runs."""
    return parallel.model_copy(update={"recompute_granularity": None})


def largest_temporaries(
    architecture: Architecture, parallel: ParallelConfig, batch: MicroBatch, kind: LayerKind
) -> int:
    """Return the bytes that exist at once beside a layer's activations, in its recomputation or its backward pass.

    In a dense layer these are the gradient of the gate and up projections' output, and the gradients of the gathered
    hidden states. A mixture of experts has its peak while it sends the experts' results back: its forward pass still
    holds the tokens in the order in which they were sent and received, and the results in the order of the experts and
    of the ranks (megatron/core/transformer/moe/moe_layer.py, MoELayer.forward).
    """
    b = batch.dtype_bytes
    if kind.has_experts:
        sent, received = _routed_tokens(architecture, parallel, batch)
        expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
        from_ranks = received // expert_tp if parallel.expert_model_parallel_size > 1 else 0
        return (sent + from_ranks + 2 * received) * architecture.hidden_size * b
    hidden = batch.tokens(parallel) * architecture.hidden_size * b
    return 2 * _mlp_elements(architecture.intermediate_size, parallel, batch) * b + 2 * hidden


def output_layer_bytes(
    architecture: Architecture, parallel: ParallelConfig, batch: MicroBatch, chunk_size: int, *, is_trained: bool
) -> tuple[int, int]:
    """Return the bytes of the log-probs and their gradients: (saved until the backward pass, peak workspace).

    `model/vocab_parallel.py` computes one chunk of tokens at a time. Its workspace is the chunk's logits and
    exponentials in fp32, their gradient, and the gradient in fp32 of a trained weight before it is rounded.
    """
    tokens, b = batch.tokens(parallel), batch.dtype_bytes
    tp = parallel.tensor_model_parallel_size
    rows = architecture.padded_vocab_size(tp) // tp
    hidden, weight = tokens * architecture.hidden_size * b, rows * architecture.hidden_size * is_trained
    logits = min(chunk_size, tokens) * rows
    rounded = b != FP32
    workspace = 2 * logits * FP32 + rounded * (weight * FP32 + logits * b)
    # All tensor-parallel ranks' tokens under sequence parallelism, and the tokens that have a label.
    gathered = hidden * (1 + parallel.sequence_parallel)
    return hidden + weight * b, workspace + gathered


def _hidden_norm(arch: Architecture, parallel: ParallelConfig, batch: MicroBatch) -> int:
    """Return the bytes of a norm of the hidden states."""
    return _norm(arch, batch.split_tokens(parallel), arch.hidden_size, batch)


def _norm(arch: Architecture, rows: int, width: int, batch: MicroBatch) -> int:
    """Return the bytes of a norm's saved input and result and of one fp32 factor per row."""
    kept = batch.dtype_bytes if batch.fused_norms else 2 * FP32
    if _norms_in_fp32(arch, batch):  # which our own module converts its input to
        kept = max(kept, FP32)
    return rows * width * kept + rows * FP32 + _norm_weight(arch, width, batch)


def _norms_in_fp32(arch: Architecture, batch: MicroBatch) -> bool:
    return arch.family.zero_centered_norms and not batch.fused_attention


def _norm_weight(arch: Architecture, width: int, batch: MicroBatch) -> int:
    """Return the bytes of the sum of one and a norm's weight, where that is what it multiplies by."""
    return _norms_in_fp32(arch, batch) * width * FP32


def _latent_attention(arch: Architecture, parallel: ParallelConfig, batch: MicroBatch, *, recompute: bool) -> Terms:
    """Return the bytes of multi-head latent attention, whose values are padded to the width of the keys."""
    tp, cp, b = parallel.tensor_model_parallel_size, parallel.context_parallel_size, batch.dtype_bytes
    tokens, split, heads = batch.tokens(parallel), batch.split_tokens(parallel), arch.num_attention_heads // tp
    wide, context = tokens * heads * arch.head_dim * b, tokens * heads * arch.v_head_dim * b
    terms: Terms = Counter()
    terms["norms"] += _norm(arch, split, arch.kv_lora_rank, batch)
    terms["norms"] += _norm(arch, split, arch.q_lora_rank, batch) * (arch.q_lora_rank > 0)
    inputs = arch.hidden_size + arch.q_lora_rank + arch.kv_lora_rank
    terms["attention projections"] += split * inputs * batch.input_bytes
    terms["rotary angles"] += 4 * tokens * arch.rotary_dim * b
    if recompute:
        terms["attention kernel"] += 2 * wide + 2 * context
    else:
        # Queries, keys, values and the kernel's output in full width, and the output projection's input.
        terms["attention kernel"] += 2 * wide + 2 * wide * (1 if batch.fused_attention else cp) + context
        terms["attention kernel"] += tokens * heads * FP32
        if cp > 1 and not batch.fused_attention:  # keys and values before they are padded, and the mask
            terms["attention kernel"] += cp * (wide + context) + _mask_elements(batch.lengths, parallel) * b
    return terms


def _attention(arch: Architecture, parallel: ParallelConfig, batch: MicroBatch, *, recompute: bool) -> Terms:
    tp, b = parallel.tensor_model_parallel_size, batch.dtype_bytes
    tokens, split, d = batch.tokens(parallel), batch.split_tokens(parallel), arch.head_dim
    heads, groups = arch.num_attention_heads // tp, max(1, arch.num_key_value_heads // tp)
    # With more tensor-parallel ranks than key/value heads, each rank gathers the projections of all ranks.
    gathered = tp if arch.num_key_value_heads < tp else 1
    projection = tokens * arch.qkv_width // tp * gathered * b
    query, key = tokens * heads * d * b, tokens * groups * d * b
    terms: Terms = Counter()
    terms["attention projections"] += split * arch.hidden_size * batch.input_bytes
    terms["rotary angles"] += 0 if batch.fused_attention else 4 * tokens * arch.rotary_dim * b
    # The whole projection output stays in memory where a saved tensor is a view of a part of it.
    keeps_projection = recompute
    if arch.family.qk_norm:
        factors = tokens * (heads + groups) * FP32 + 2 * _norm_weight(arch, d, batch)
        if batch.fused_norms and b != FP32 and _norms_in_fp32(arch, batch):
            terms["norms"] += factors + tokens * (heads + groups) * d * FP32
        elif batch.fused_norms:
            # The key norm's input is a view of the projection's output. Megatron copies the query's heads into a
            # tensor of their own, which the query norm saves, unless they are all of one group.
            terms["norms"] += factors + (query if heads > groups > 1 else 0)
            keeps_projection = True
        else:
            terms["norms"] += factors + 2 * tokens * (heads + groups) * d * FP32
            if b == FP32:  # the key norm's input is a view of the projection's output, not a copy
                terms["norms"] -= tokens * groups * d * FP32
                keeps_projection = True
    context = tokens * heads * d * b
    if batch.fused_attention:
        # The output projection saves the kernel's output itself, unless it quantizes it to FP8.
        rounded = tokens * heads * d * batch.input_bytes if batch.input_bytes != b else 0
        factors = 0 if recompute else tokens * heads * FP32
        terms["attention kernel"] += query + 2 * key + context + rounded + factors
    elif recompute:
        terms["attention kernel"] += query + key + context
    elif arch.family.attention_sinks:
        cp = parallel.context_parallel_size
        terms["attention kernel"] += context + _attention_with_sinks(arch, parallel, batch, heads)
        terms["attention kernel"] += 2 * key * cp * (cp > 1)  # gathered keys and values
    else:
        cp = parallel.context_parallel_size
        copies = heads != groups or cp > 1
        keys = tokens * cp * heads * d * b if copies else key
        values = keys if copies else 0
        keeps_projection |= not copies
        terms["attention kernel"] += query + keys + values + 2 * context + tokens * heads * FP32
        if cp > 1:  # gathered keys and values before they are repeated for the query heads, and the mask
            terms["attention kernel"] += 2 * key * cp + _mask_elements(batch.lengths, parallel) * b
    terms["attention projections"] += projection * keeps_projection
    if arch.family.output_gate:  # what it weights, and the sigmoid in fp32
        terms["attention kernel"] += context + tokens * heads * d * FP32
    return terms


def _gated_delta_net(arch: Architecture, parallel: ParallelConfig, batch: MicroBatch, *, recompute: bool) -> Terms:
    """Return the bytes of a Gated DeltaNet. What is between its projections may be computed again."""
    tp, cp, b = parallel.tensor_model_parallel_size, parallel.context_parallel_size, batch.dtype_bytes
    tokens, output = batch.tokens(parallel), batch.tokens(parallel) * arch.linear_value_width // tp
    terms = Counter({"attention projections": batch.split_tokens(parallel) * arch.hidden_size * batch.input_bytes})
    terms["attention projections"] += output * batch.input_bytes
    if recompute or cp > 1:  # what is recomputed reads it, and what puts the tokens of all ranks into order
        terms["attention projections"] += tokens * arch.linear_in_width // tp * b
    if not recompute:
        terms["attention kernel"] += saved_bytes(arch, batch.lengths, tp * cp, b)
    return terms


def _attention_with_sinks(arch: Architecture, parallel: ParallelConfig, batch: MicroBatch, heads: int) -> int:
    """Return the bytes that our attention saves of `heads` wider by the sink, with another key for each sequence.

    Sequences of a length share a mask unless context parallelism divides them.
    """
    cp, b, tokens = parallel.context_parallel_size, batch.dtype_bytes, batch.tokens(parallel)
    wide = width_with_sink(arch.head_dim)
    num_keys = sum(length + 1 for length in batch.lengths)
    masked = set(batch.lengths) if cp == 1 else batch.lengths
    mask = sum(length // cp * (length + 1) for length in masked)
    return heads * (2 * tokens + 2 * num_keys) * wide * b + tokens * heads * FP32 + mask * b


def _adapter_bytes(
    adapter: Adapter, arch: Architecture, parallel: ParallelConfig, batch: MicroBatch, lora: LoraConfig
) -> int:
    """Return the bytes that an adapter saves beside its input: the products with A, and both halves as multiplied.

    `model/lora.py` concatenates the A of fused modules, and spreads B over their columns. Dropout saves its mask.
    """
    tokens, split = batch.tokens(parallel), batch.split_tokens(parallel)
    num_in, num_out = (tokens, split) if adapter.is_row_parallel else (split, tokens)
    if adapter.is_whole:
        num_out = split
    if adapter.is_of_expert:
        num_experts = arch.num_experts // parallel.expert_model_parallel_size
        num_in = num_out = _routed_tokens(arch, parallel, batch)[1] // num_experts
    mask = num_in * adapter.numel_A // (adapter.num_parts * lora.rank) if lora.dropout else 0
    products = num_out * adapter.num_parts * lora.rank
    halves = adapter.numel_A + adapter.num_parts * adapter.numel_B
    return (products + halves) * batch.dtype_bytes + mask


def _unsaved_inputs(
    arch: Architecture, parallel: ParallelConfig, batch: MicroBatch, kind: LayerKind, lora: LoraConfig
) -> Terms:
    """Return the bytes of the inputs of frozen linear layers without an adapter, which nothing reads again."""
    tokens, split, targets = batch.tokens(parallel), batch.split_tokens(parallel), set(lora.target_modules)
    heads = tokens * arch.num_attention_heads // parallel.tensor_model_parallel_size
    terms: Terms = Counter()
    if kind.has_delta_net:
        terms["attention projections"] += split * arch.hidden_size
        terms["attention projections"] += tokens * arch.linear_value_width // parallel.tensor_model_parallel_size
    elif targets.isdisjoint(("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")):
        terms["attention projections"] += split * arch.hidden_size
    if "q_b_proj" not in targets:
        terms["attention projections"] += split * arch.q_lora_rank
    if "kv_b_proj" not in targets:
        terms["attention projections"] += split * arch.kv_lora_rank
    if "o_proj" not in targets and not batch.fused_attention and not kind.has_delta_net:
        terms["attention kernel"] += heads * arch.value_dim
    mlp, routed = (_mlp_elements(arch.intermediate_size, parallel, batch), split) if not kind.has_experts else (0, 0)
    if kind.has_experts:
        routed = _routed_tokens(arch, parallel, batch)[1]
        expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
        mlp = routed * arch.moe_intermediate_size // expert_tp
        if "down_proj" not in targets:
            terms["shared expert"] += _mlp_elements(arch.shared_expert_intermediate_size, parallel, batch)
    if targets.isdisjoint(("gate_proj", "up_proj")):
        terms["experts" if kind.has_experts else "mlp"] += routed * arch.hidden_size
    if "down_proj" not in targets:
        terms["experts" if kind.has_experts else "mlp"] += mlp
    return Counter({name: num * batch.input_bytes for name, num in terms.items()})


def _mask_elements(lengths: Sequence[int], parallel: ParallelConfig) -> int:
    """Return the elements of the additive attention mask of this rank's queries."""
    return sum(length * length for length in lengths) // parallel.context_parallel_size


def _mlp_elements(width: int, parallel: ParallelConfig, batch: MicroBatch) -> int:
    """Return the elements of the gate projection's output of an MLP; the up projection has as many."""
    return batch.tokens(parallel) * width // parallel.tensor_model_parallel_size


def _routed_tokens(arch: Architecture, parallel: ParallelConfig, batch: MicroBatch) -> tuple[int, int]:
    """Return the tokens that a rank sends to experts and those that its own experts get, once for each expert."""
    sent = batch.split_tokens(parallel) * arch.num_experts_per_tok
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    return sent, int(sent * expert_tp * batch.expert_imbalance)


def _experts(arch: Architecture, parallel: ParallelConfig, batch: MicroBatch) -> Terms:
    """Return the bytes of the router, the token permutation, and the experts' MLPs on the tokens sent to this rank.

    The shared expert reads the router's input. Its gate saves itself and the output that it weights.
    """
    split, b, chosen = batch.split_tokens(parallel), batch.dtype_bytes, arch.num_experts_per_tok
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    _, received = _routed_tokens(arch, parallel, batch)
    mlp = received * arch.moe_intermediate_size // expert_tp
    return Counter(
        {
            "router": split * arch.hidden_size * b
            + split * (chosen * (2 * INDEX + FP32) + arch.num_experts * (1 + FP32) + _sigmoid_bytes(arch)),
            # Gate and up, the intermediate results up to the second projection's input, and each token's weight.
            "experts": received * arch.hidden_size * batch.input_bytes
            + mlp * ((6 * b if arch.family.clamped_swiglu else batch.swiglu_bytes) + b + batch.input_bytes)
            + received * FP32,
            "shared expert": _mlp_elements(arch.shared_expert_intermediate_size, parallel, batch)
            * (batch.swiglu_bytes + batch.input_bytes)
            + split * (arch.hidden_size + 1) * b * arch.family.shared_expert_gate,
        }
    )


def _sigmoid_bytes(arch: Architecture) -> int:
    """Return the bytes per token that a router saves to score experts by a sigmoid instead of a softmax.

    They are the scores of all experts, those of the selected ones with their sum, and what choosing groups saves.
    """
    if not arch.family.sigmoid_router:
        return 0
    grouped = arch.topk_group < arch.n_group
    best_of_groups = arch.n_group * arch.num_experts_per_tok // arch.topk_group * INDEX + arch.num_experts
    return (arch.num_experts + arch.num_experts_per_tok + 1) * FP32 + best_of_groups * grouped
