"""What the recurrence of a Gated DeltaNet saves, computes and keeps for each sequence (arXiv 2412.06464).

Legend: K key heads of a rank, H value heads, D width of a key, E width of a value, C tokens of a chunk, b bytes of the
model's dtype. `model/delta_rule.py` computes in fp32, in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.linear_attention_fields import CHUNK
from megatron_bapo.config.padding import round_up
from megatron_bapo.planning.model_state import FP32


def state_bytes(arch: Architecture, num_ranks: int, dtype_bytes: int) -> int:
    """Return the bytes of a sequence's state in one layer of an engine of `num_ranks` ranks, convolution included.

    The recurrence's state is in fp32, as `rollout/engine_args.py` asks for it.
    """
    matrices = arch.linear_num_value_heads * arch.linear_key_head_dim * arch.linear_value_head_dim
    mixed = arch.linear_mixed_width
    return (matrices * FP32 + (arch.linear_conv_kernel_dim - 1) * mixed * dtype_bytes) // num_ranks


def saved_bytes(arch: Architecture, lengths: Sequence[int], num_ranks: int, dtype_bytes: int) -> int:
    """Return the bytes that a rank saves between a layer's projections; `num_ranks` share the heads of `lengths`.

    Its input and output are not included. Sequences are padded to whole chunks.
    """
    b, width = dtype_bytes, arch.linear_key_head_dim + arch.linear_value_head_dim
    num_keys, heads = arch.linear_num_key_heads // num_ranks, arch.linear_num_value_heads // num_ranks
    mixed = arch.linear_mixed_width // num_ranks
    padded = [round_up(length, CHUNK) for length in lengths]
    tokens, slots = sum(lengths), sum(padded)
    wide, values = FP32 * heads * arch.linear_key_head_dim, FP32 * heads * arch.linear_value_head_dim
    # The convolution's input, for one key head a view of the projection, and its output, which is longer than a
    # sequence; queries and keys before they are normalized.
    convolved = b * tokens * (mixed if num_keys > 1 else arch.linear_in_width // num_ranks)
    convolved += b * mixed * (tokens + len(lengths) * (arch.linear_conv_kernel_dim - 1))
    normalized = tokens * FP32 * (2 * num_keys + (mixed if b == FP32 else 2 * num_keys * arch.linear_key_head_dim))
    # Before the chunks: softplus of the decay and what it has read, beta, and the scale of the output's norm.
    of_tokens = tokens * FP32 * heads * 4
    # Decays between tokens, scores and the system, the latter two with and without decay; query and key without and
    # key with decay, keys times beta twice; values, and what each token writes; the solution; beta and decays.
    of_slots = slots * (FP32 * heads * (5 * CHUNK + 3) + 5 * wide + 2 * values + FP32 * heads * width)
    # The query with decay, which reads nothing from the state before the first chunk.
    of_slots += sum(size for size in padded if size > CHUNK) * wide
    states = slots // CHUNK * FP32 * heads * arch.linear_key_head_dim * arch.linear_value_head_dim
    # The output in fp32, normalized and weighted; the gate and its SiLU in fp32.
    gated = (slots if b == FP32 else tokens) * values + 2 * tokens * values // FP32 * b + 2 * tokens * values
    # Sequences of a length are one batch, with a mask within chunks.
    of_batches = len(set(lengths)) * (CHUNK * CHUNK + FP32 * heads * 2)
    return convolved + normalized + of_tokens + of_slots + states + gated + of_batches
