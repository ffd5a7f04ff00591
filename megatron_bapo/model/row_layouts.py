"""How tensor-parallel ranks split Megatron's parameters: ranges of the rows of Hugging Face tensors.

A layout is a function from (architecture, rank, number of ranks) to pieces. A piece maps rows (or columns) of one
Hugging Face tensor to rows of this rank's local tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_bapo.config.architecture import Architecture


def lengths(arch: Architecture) -> dict[str, int]:
    """Return the sizes of the dims of the tensors by their names in the table."""
    return {
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "head": arch.head_dim,
        "heads": arch.num_attention_heads,
        "queries": arch.num_attention_heads * arch.head_dim,
        "keys": arch.num_key_value_heads * arch.head_dim,
        "values": arch.num_attention_heads * arch.value_dim,
        "q_rank": arch.q_lora_rank,
        "kv_rank": arch.kv_lora_rank,
        "kv_and_rotated": arch.cached_dim,
        "keys_and_values": arch.num_attention_heads * (arch.qk_nope_head_dim + arch.v_head_dim),
        "mlp": arch.intermediate_size,
        "experts": arch.num_experts,
        "expert_mlp": arch.moe_intermediate_size,
        "shared_mlp": arch.shared_expert_intermediate_size,
    }


@dataclass(frozen=True)
class Piece:
    """A range of the split dim: `size` indices from `hf_start` in Hugging Face tensor `part`, locally `local_start`."""

    part: int
    hf_start: int
    local_start: int
    size: int


Layout = Callable[[Architecture, int, int], list[Piece]]


def evenly(field: str, num_parts: int, arch: Architecture, rank: int, size: int) -> list[Piece]:
    """Split tensors evenly: each rank has its share of the first tensor, then its share of the next one."""
    rows = lengths(arch)[field] // size
    return [Piece(part, rank * rows, part * rows, rows) for part in range(num_parts)]


def vocabulary(arch: Architecture, rank: int, size: int) -> list[Piece]:
    """Split the vocabulary, padded to a multiple of the ranks; padding rows are in no piece."""
    rows = arch.padded_vocab_size(size) // size
    start = min(rank * rows, arch.vocab_size)
    stop = min(start + rows, arch.vocab_size)
    return [Piece(0, start, 0, stop - start)]


def query_key_value(arch: Architecture, rank: int, size: int) -> list[Piece]:
    """Split the fused QKV matrix, in which Megatron stores for each key/value head its query heads, key and value.

    The split is even, so with fewer key/value heads than ranks it divides the group of a head.
    """
    d = arch.head_dim
    query_rows = arch.num_attention_heads // arch.num_key_value_heads * d
    num_rows = arch.num_key_value_heads * (query_rows + 2 * d) // size
    first, end, pieces = rank * num_rows, 0, []
    for head in range(arch.num_key_value_heads):
        for part, rows in ((0, query_rows), (1, d), (2, d)):
            start, end = end, end + rows
            low, high = max(start, first), min(end, first + num_rows)
            if low < high:
                pieces.append(Piece(part, head * rows + low - start, low - first, high - low))
    return pieces
