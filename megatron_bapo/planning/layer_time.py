"""Seconds of a layer's kernels on one GPU, for one micro-batch.

Matrix products count by their tiles, all other kernels by the bytes that they move. Sources: NVIDIA's "Matrix
Multiplication Background User's Guide" for tile and wave quantization, arXiv 2307.08691 (FlashAttention-2) for the
FLOPs of attention's backward pass. Tokens are those of a micro-batch on one context-parallel rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.linear_attention_fields import CHUNK
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.planning.delta_net import saved_bytes
from megatron_bapo.planning.hardware import Assumptions, Gpu

TILE_ROWS, TILE_COLUMNS = 128, 256
"""Size of the output tile that one multiprocessor computes at a time; cuBLAS's usual one for large products."""
KERNEL_S = 4e-6
"""Seconds of a kernel that has next to nothing to do. vLLM's quantization of a small tensor with one scale is three
such kernels in a row, and takes 11 to 14 us on H100 and B200 (vllm-project/vllm#24342, vllm-project/vllm#24697)."""
CHUNK_KERNELS = 8
"""Kernels of the recurrence of a Gated DeltaNet for each chunk of tokens (`model/delta_rule.py`)."""
QUANTISED_EXPERT_TENSORS = 4
"""Tensors of an expert that Transformer Engine's GroupedLinear quantizes for each micro-batch: the inputs of both
products and the gradients of both outputs."""
BLOCKWISE_SPEED = 0.75
"""Speed of products with block scales on Hopper over those with one scale per tensor: partial sums are scaled outside
the tensor cores (arXiv 2412.19437, section 3.3.2)."""
ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward pass over those of the forward pass: it recomputes the scores."""
ELEMENTWISE_BACKWARD = 2.0
"""Bytes that the backward passes of element-wise kernels move over those of the forward passes: they read the saved
input and the gradient, and write a gradient."""


@dataclass(frozen=True)
class Passes:
    """Seconds of a forward and of a backward pass."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Passes:
        return Passes(self.forward * factor, self.backward * factor)


BF16_BYTES = 2


@dataclass(frozen=True)
class Kernels:
    """The speed of a GPU's kernels in one precision."""

    gpu: Gpu
    assumptions: Assumptions
    fp8_recipe: str | None = None
    """Scaling recipe of the products in FP8; None: bfloat16."""
    adapted: tuple[str, ...] | None = None
    """Linear layers that have low-rank adapters, while all weights are frozen; None: weights are trained."""

    @property
    def flops_per_s(self) -> float:
        if self.fp8_recipe is None or not self.gpu.fp8_tflops:  # without FP8 products the plan does not fit anyway
            return self.gpu.bf16_flops * self.assumptions.compute_efficiency
        slower = BLOCKWISE_SPEED if self.fp8_recipe == "blockwise" else 1.0
        return self.gpu.fp8_flops * self.assumptions.fp8_efficiency * slower

    @property
    def tile_s(self) -> float:
        return self.assumptions.tile_us / 1e6

    @property
    def bytes_per_s(self) -> float:
        return self.gpu.memory_tb_s * 1e12 * self.assumptions.memory_efficiency

    @property
    def quantising_bytes(self) -> int:
        """Bytes that move per element that is quantized: read, write it and its transpose; `tensorwise` finds the
        largest value in another pass first."""
        return 0 if self.fp8_recipe is None else 6 if self.fp8_recipe == "tensorwise" else 4

    @property
    def quantising_kernels(self) -> int:
        """Kernels in which Transformer Engine quantizes one expert's tensor.

        `multi_tensor_quantize_impl` (pytorch/csrc/extensions/cast.cpp of 2.9) goes from expert to expert.
        `tensorwise` resets the largest value, finds it, computes the scale, casts and transposes
        (common/recipe/current_scaling.cu); only `delayed` has one kernel for many experts.
        """
        return {None: 0, "delayed": 0, "tensorwise": 4}.get(self.fp8_recipe, 1)

    def product(self, rows: float, columns: float, inner: float, count: float = 1.0) -> float:
        """Return the seconds of `count` products [rows, inner] x [inner, columns].

        All multiprocessors compute one tile each at a time, so that the last tiles keep only some of them busy. Experts
        share these last tiles: Transformer Engine's GroupedLinear launches one cuBLAS product for each, in turn on four
        streams (`multi_stream_cublas_gemm` in common/gemm/cublaslt_gemm.cu), where the next ones fill what is idle.
        """
        tiles = count * math.ceil(max(rows, 1.0) / TILE_ROWS) * math.ceil(columns / TILE_COLUMNS)
        waves = math.ceil(tiles / self.gpu.num_sms)
        whole = waves * (2.0 * self.gpu.num_sms * TILE_ROWS * TILE_COLUMNS * inner / self.flops_per_s + self.tile_s)
        # Kernels choose smaller tiles where these leave many multiprocessors idle, at about half the speed.
        smaller = 2 * 2.0 * count * rows * columns * inner / self.flops_per_s + self.tile_s
        return min(whole, max(smaller, whole / 4))

    def linear(
        self, rows: float, columns: float, inner: float, count: float = 1.0, *, modules: tuple[str, ...] = ()
    ) -> Passes:
        """Return the seconds of a linear layer: one product forward, and one each for input and weight backward.

        `modules` are the Hugging Face names of what the layer fuses. A frozen weight has no gradient. Products with an
        adapter's few columns take as long as moving the layer's input and output, which is read and written again.
        """
        once = Passes(self.product(rows, columns, inner, count), self.product(rows, inner, columns, count))
        if self.adapted is None:
            return once + Passes(0.0, self.product(columns, inner, rows, count))
        is_adapted = not set(modules).isdisjoint(self.adapted)
        return once + self.moved(BF16_BYTES * count * rows * (inner + 2 * columns) * is_adapted)

    def moved(self, num_bytes: float, backward: float = ELEMENTWISE_BACKWARD) -> Passes:
        """Return the seconds of kernels that move this many bytes forward."""
        return Passes(1.0, backward) * (num_bytes / self.bytes_per_s)

    def quantised(self, forward: float, backward: float) -> Passes:
        """Return the seconds in which these many elements of inputs and of gradients are quantized."""
        return Passes(forward, backward) * (self.quantising_bytes / self.bytes_per_s)


def mixing_block(
    kernels: Kernels, arch: Architecture, tp: int, sp: int, cp: int, tokens: float, square: float
) -> Passes:
    """Return the seconds of the mean layer's attention or Gated DeltaNet; see `attention_block`."""
    if not arch.linear_share:
        return attention_block(kernels, arch, tp, sp, cp, tokens, square)
    linear = delta_net_block(kernels, arch, tp, sp, cp, tokens, square)
    attention = attention_block(kernels, arch, tp, sp, cp, tokens, square)
    return linear * arch.linear_share + attention * (1 - arch.linear_share)


@lru_cache(maxsize=65536)
def delta_net_block(
    kernels: Kernels, arch: Architecture, tp: int, sp: int, cp: int, tokens: float, square: float
) -> Passes:
    """Return the seconds of a Gated DeltaNet with its projections, norms and residual connections."""
    values, hidden = arch.linear_value_width / tp, 10.0 * arch.hidden_size / sp
    return (
        kernels.linear(tokens, arch.linear_in_width / tp, arch.hidden_size)
        + kernels.linear(tokens, arch.hidden_size, values)
        + recurrence(kernels, arch, tp, cp, tokens, square)
        + kernels.moved(2 * tokens * hidden)
        + kernels.quantised(
            tokens * (arch.hidden_size + values), tokens * (arch.linear_in_width / tp + arch.hidden_size)
        )
    )


def mixing_seconds(
    kernels: Kernels, arch: Architecture, tp: int, cp: int, tokens: float, square: float, scores: float
) -> float:
    """Return the forward seconds of what is between the mean layer's projections; `scores` are those of attention."""
    if not arch.linear_share:
        return scores
    linear = recurrence(kernels, arch, tp, cp, tokens, square).forward
    return linear * arch.linear_share + scores * (1 - arch.linear_share)


def recurrence(kernels: Kernels, arch: Architecture, tp: int, cp: int, tokens: float, square: float) -> Passes:
    """Return the seconds of what is between the projections of a Gated DeltaNet.

    Its kernels write each saved tensor once and read it once. Chunks follow each other; sequences are computed at once.
    """
    saved = saved_bytes(arch, (max(1, round(tokens * cp)),), tp * cp, BF16_BYTES)
    num_chunks = square / max(1.0, tokens * cp) / CHUNK
    return kernels.moved(2 * saved) + Passes(1.0, ELEMENTWISE_BACKWARD) * (KERNEL_S * CHUNK_KERNELS * num_chunks)


@lru_cache(maxsize=65536)
def attention_block(
    kernels: Kernels, arch: Architecture, tp: int, sp: int, cp: int, tokens: float, square: float
) -> Passes:
    """Return the seconds of a layer's attention with its projections, norms and residual connections.

    `square` is the sum over the micro-batch's sequences of their squared lengths, on all context-parallel ranks; `sp`
    is `tp` with sequence parallelism, else 1. Layers with and without a window count as the mean of both.
    """
    query, value = (arch.num_attention_heads * width / tp for width in (arch.head_dim, arch.value_dim))
    both = max(1.0, arch.num_key_value_heads / tp) * (arch.head_dim + arch.value_dim)
    flops = 2.0 * arch.attention_width / tp * arch.attended(tokens * cp, square) / (1 - arch.linear_share) / cp
    score = flops / (kernels.gpu.bf16_flops * kernels.assumptions.attention_efficiency)
    # Both norms and residual connections read and write the hidden states; rotary embeddings and QK norms the heads.
    gate = arch.family.output_gate * query
    heads = 2 * (1 + arch.family.qk_norm) * (query + both / 2) + 3 * gate
    hidden = 10.0 * arch.hidden_size / sp
    return (
        _projections(kernels, arch, tp, sp, tokens, query + gate, both)
        + kernels.linear(tokens, arch.hidden_size, value, modules=("o_proj",))
        + Passes(score, ATTENTION_BACKWARD * score)
        + kernels.moved(2 * tokens * (hidden + heads))
        + kernels.quantised(tokens * (arch.hidden_size + query), tokens * (query + gate + both + arch.hidden_size))
    )


def _projections(
    kernels: Kernels, arch: Architecture, tp: int, sp: int, tokens: float, query: float, both: float
) -> Passes:
    """Return the seconds of the projections to queries, and to keys and values, of these widths on a rank.

    Latent attention has whole down-projections on every rank, for the tokens that sequence parallelism gives it.
    """
    if not arch.kv_lora_rank:
        return kernels.linear(tokens, query + both, arch.hidden_size, modules=("q_proj", "k_proj", "v_proj"))
    down = kernels.linear(tokens / sp, arch.cached_dim, arch.hidden_size, modules=("kv_a_proj_with_mqa",))
    if arch.q_lora_rank:
        down += kernels.linear(tokens / sp, arch.q_lora_rank, arch.hidden_size, modules=("q_a_proj",))
    up = arch.num_attention_heads / tp * (arch.qk_nope_head_dim + arch.v_head_dim)
    name = "q_b_proj" if arch.q_lora_rank else "q_proj"
    queries = kernels.linear(tokens, query, arch.q_lora_rank or arch.hidden_size, modules=(name,))
    return down + queries + kernels.linear(tokens, up, arch.kv_lora_rank, modules=("kv_b_proj",))


@lru_cache(maxsize=65536)
def mlp_block(kernels: Kernels, arch: Architecture, width: float, tokens: float) -> Passes:
    """Return the seconds of an MLP that all tokens pass, with this width on each tensor-parallel rank."""
    return (
        kernels.linear(tokens, 2 * width, arch.hidden_size, modules=("gate_proj", "up_proj"))
        + kernels.linear(tokens, arch.hidden_size, width, modules=("down_proj",))
        + kernels.moved(2 * tokens * 3 * width)
        + kernels.quantised(tokens * (arch.hidden_size + width), tokens * (2 * width + arch.hidden_size))
    )


def reached(arch: Architecture, parts: float) -> float:
    """Return the probability that a token is routed to one of `parts` equal parts of the experts, balanced.

    Routers that limit it choose all experts of a token from `topk_group` of `n_group` groups (Megatron-Core's
    `group_limited_topk`). A part lies in one group or holds whole groups.
    """
    groups, most, chosen = arch.n_group, arch.topk_group, arch.num_experts_per_tok
    if parts >= groups:
        return most / groups * (1 - (1 - groups / (parts * most)) ** chosen)
    held = round(groups / parts)
    ways = [math.comb(held, among) * math.comb(groups - held, most - among) for among in range(min(held, most) + 1)]
    missed = sum(number * (1 - among / most) ** chosen for among, number in enumerate(ways))
    return 1 - missed / math.comb(groups, most)


@lru_cache(maxsize=65536)
def expert_block(kernels: Kernels, arch: Architecture, parallel: ExpertSplit, tokens: float) -> Passes:
    """Return the seconds of router, permutations and experts, on the rank with the most tokens.

    `tokens` are those that the rank routes. Permuting copies each token once per expert, and a rank with several
    experts sorts what it receives by expert and back. In FP8 each expert's tokens are padded to a multiple of 16 or 32
    and back, which copies them. HybridEP and DeepEP pad while they permute; they put a token once into the buffer of
    every rank with one of its experts, and copy it from there (moe_permute_fusion_into_hybridep is off by default).
    """
    chosen, hidden = arch.num_experts_per_tok, arch.hidden_size
    imbalance = kernels.assumptions.expert_imbalance if parallel.expert > 1 else 1.0
    received = tokens * chosen * parallel.expert_tensor * imbalance
    local, width = arch.num_experts / parallel.expert, arch.moe_intermediate_size / parallel.expert_tensor
    fused = kernels.assumptions.dispatcher != "alltoall"
    sorted_ = 0.0 if fused or parallel.expert == 1 or local <= 1 else 4.0 * chosen * imbalance
    # Permuting reads and writes every copy. Undoing it scales the copies by their weights and adds them up.
    buffered = 4.0 * parallel.expert * reached(arch, parallel.expert) if parallel.expert > 1 else 0.0
    copied = 2.0 * (1 + chosen) + buffered if fused else 7.0 * chosen
    padded = 4.0 * chosen * imbalance if kernels.fp8_recipe is not None and not fused else 0.0
    launched = KERNEL_S * kernels.quantising_kernels * QUANTISED_EXPERT_TENSORS / 2 * local
    moved = 2 * hidden * tokens * (copied + sorted_ + padded) + 2 * received * 3 * width
    return (
        kernels.linear(received / local, 2 * width, hidden, local, modules=("gate_proj", "up_proj"))
        + kernels.linear(received / local, hidden, width, local, modules=("down_proj",))
        + kernels.moved(moved)
        + replace(kernels, fp8_recipe=None).linear(tokens, arch.num_experts, hidden)
        + kernels.quantised(received * (hidden + width), received * (2 * width + hidden))
        + Passes(launched, launched)
    )


def moe_block(
    kernels: Kernels, arch: Architecture, parallel: ExpertSplit, tp: int, tokens: float, routed: float
) -> Passes:
    """Return the seconds of a layer's experts on `routed` tokens and of its shared expert, if any, on all `tokens`."""
    experts, width = expert_block(kernels, arch, parallel, routed), arch.shared_expert_intermediate_size / tp
    return experts + mlp_block(kernels, arch, width, tokens) if width else experts


@lru_cache(maxsize=4096)
def output_block(kernels: Kernels, arch: Architecture, tp: int, tokens: float) -> Passes:
    """Return the seconds of the output layer and the log-probs; the logits are computed again in the backward pass."""
    columns = arch.padded_vocab_size(tp) / tp
    logits = kernels.linear(tokens, columns, arch.hidden_size)
    return logits + Passes(0.0, logits.forward) + kernels.moved(10 * tokens * columns, 1.0)


@dataclass(frozen=True)
class ExpertSplit:
    """Parallel sizes of the experts."""

    expert: int
    expert_tensor: int

    @classmethod
    def of(cls, parallel: ParallelConfig) -> ExpertSplit:
        tensor = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
        return cls(parallel.expert_model_parallel_size, tensor)
