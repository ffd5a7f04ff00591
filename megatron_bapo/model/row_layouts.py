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
        "queries": arch.num_attention_heads * arch.head_dim * (1 + arch.family.output_gate),
        "keys": arch.num_key_value_heads * arch.head_dim,
        "values": arch.num_attention_heads * arch.value_dim,
        "q_rank": arch.q_lora_rank,
        "kv_rank": arch.kv_lora_rank,
        "kv_and_rotated": arch.cached_dim,
        "keys_and_values": arch.num_attention_heads * (arch.qk_nope_head_dim + arch.v_head_dim),
        "linear_value_heads": arch.linear_num_value_heads,
        "linear_value": arch.linear_value_head_dim,
        "linear_values": arch.linear_value_width,
        "linear_qkv": arch.linear_mixed_width,
        "linear_qkvz": 2 * (arch.linear_key_width + arch.linear_value_width),
        "linear_ba": 2 * arch.linear_num_value_heads,
        "linear_kernel": arch.linear_conv_kernel_dim,
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

    With an output gate, each head of the query has its gate behind it in files, and Megatron stores the gates of the
    query heads between these and the key. The split is even, so with fewer key/value heads than ranks it divides the
    group of a head.
    """
    d, parts = arch.head_dim, 1 + arch.family.output_gate
    per_group = arch.num_attention_heads // arch.num_key_value_heads
    blocks: list[tuple[int, int, int]] = []
    for group in range(arch.num_key_value_heads):
        heads = range(group * per_group, (group + 1) * per_group)
        if parts == 1:
            blocks.append((0, heads.start * d, per_group * d))
        else:
            blocks += [(0, (head * parts + part) * d, d) for part in range(parts) for head in heads]
        blocks += [(1, group * d, d), (2, group * d, d)]
    return _share(blocks, rank, size)


def _share(blocks: list[tuple[int, int, int]], rank: int, size: int) -> list[Piece]:
    """Return a rank's even share of a tensor that consists of `blocks`: rows of (part, first row, number of rows)."""
    num_rows = sum(rows for _, _, rows in blocks) // size
    first, end, pieces = rank * num_rows, 0, []
    for part, hf_start, rows in blocks:
        start, end = end, end + rows
        low, high = max(start, first), min(end, first + num_rows)
        if low < high:
            pieces.append(Piece(part, hf_start + low - start, low - first, high - low))
    return pieces


_KEY_HEAD: dict[str, Callable[[Architecture], int]] = {
    "key": lambda arch: arch.linear_key_head_dim,
    "values": lambda arch: arch.linear_value_width // arch.linear_num_key_heads,
    "scalars": lambda arch: arch.linear_num_value_heads // arch.linear_num_key_heads,
    "projections": lambda arch: 2 * (arch.linear_key_width + arch.linear_value_width) // arch.linear_num_key_heads,
    "pairs": lambda arch: 2 * arch.linear_num_value_heads // arch.linear_num_key_heads,
}
"""Rows of a key head: of a query or key, of its values or gates, of one number per value head, and of both of each."""


def key_heads(*tensors: tuple[str, ...]) -> Layout:
    """Return the layout that stores the parts of each key head of a Gated DeltaNet next to each other, head by head.

    Each Hugging Face tensor is given by its blocks, named as in `_KEY_HEAD`. A block has the rows of the first head,
    then those of the next one.
    """

    def layout(arch: Architecture, rank: int, size: int) -> list[Piece]:
        blocks = []
        for head in range(arch.linear_num_key_heads):
            for part, names in enumerate(tensors):
                start = 0
                for rows in (_KEY_HEAD[name](arch) for name in names):
                    blocks.append((part, start + head * rows, rows))
                    start += rows * arch.linear_num_key_heads
        return _share(blocks, rank, size)

    return layout
