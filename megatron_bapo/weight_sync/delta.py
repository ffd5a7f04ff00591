"""Lossless differences between two versions of a bucket: which elements changed, and their new bytes.

Elements are compared and copied as integers, which preserves NaNs and the sign of zero. Both sides work on blocks of
`BLOCK` elements. The positions in a block are offsets of two bytes or one bit per element, whichever is smaller.

    message = bytes per element (1), blocks (8), changes of each block (4 each), positions of each block, values
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

BLOCK = 1 << 16
"""Number of elements of a block, so that an offset fits into two bytes."""
_HEADER = struct.Struct("<BQ")
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Part = memoryview


def encode(new: Sequence[Part], old: Sequence[Part], item_bytes: int) -> np.ndarray | None:
    """Return the message that turns the parts `old` into `new`, of the same sizes: uint8 [num_bytes].

    Returns None if it would not be smaller than the new bytes.
    """
    from megatron_bapo.weight_sync.delta_loops import find_changes  # imports numba

    all_counts, positions, all_values = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    limit, size = sum(map(len, new)), _HEADER.size
    for after, before in zip(new, old, strict=True):
        assert len(after) == len(before), "the compiled loops check no bounds"
        elements = np.frombuffer(after, _INTEGERS[item_bytes])
        counts = np.zeros(_num_blocks(len(elements)), np.uint32)
        offsets, values = np.empty(len(elements) + 1, np.uint16), np.empty(len(elements) + 1, elements.dtype)
        olds = np.frombuffer(before, elements.dtype)
        new_words, old_words = (np.frombuffer(part, np.uint64, len(part) // 8) for part in (after, before))
        found = find_changes(new_words, old_words, elements, olds, BLOCK, limit - size, counts, offsets, values)
        if found < 0:
            return None
        coded = _coded(offsets[:found], counts, len(elements))
        all_counts.append(counts)
        positions.append(coded)
        all_values.append(values[:found].view(np.uint8))
        size += counts.nbytes + coded.nbytes + all_values[-1].nbytes
    if size >= limit:
        return None
    header = np.frombuffer(_HEADER.pack(item_bytes, sum(map(len, all_counts))), np.uint8)
    return np.concatenate([header, *(counts.view(np.uint8) for counts in all_counts), *positions, *all_values])


def decode(message: memoryview, parts: Sequence[Part]) -> None:
    """Write the changes to the parts, which have the old bytes. Raises ValueError if the message does not fit them."""
    from megatron_bapo.weight_sync.delta_loops import apply_changes  # imports numba

    item_bytes, num_blocks = _HEADER.unpack_from(message)
    targets = [np.frombuffer(part, _INTEGERS[item_bytes]) for part in parts]
    expected_blocks = sum(_num_blocks(len(target)) for target in targets)
    _check(num_blocks == expected_blocks, f"it has {num_blocks} blocks, not {expected_blocks}")
    all_counts = np.frombuffer(message, np.uint32, num_blocks, _HEADER.size).copy()
    split = np.cumsum([_num_blocks(len(target)) for target in targets])[:-1]
    position = _HEADER.size + all_counts.nbytes
    counts_by_part = np.split(all_counts, split)
    sizes = [int(_position_bytes(c, len(t)).sum()) for c, t in zip(counts_by_part, targets, strict=True)]
    value = position + sum(sizes)
    expected = value + int(all_counts.sum(dtype=np.int64)) * item_bytes
    _check(len(message) == expected, f"it has {len(message)} bytes, not {expected}")
    for target, counts, size in zip(targets, counts_by_part, sizes, strict=True):
        offsets = _decoded(np.frombuffer(message, np.uint8, size, position), counts, len(target))
        # Copies, because the message's numbers are at any address.
        values = np.frombuffer(message, target.dtype, len(offsets), value).copy()
        fits = apply_changes(target, BLOCK, counts, offsets, values)
        _check(fits, f"it has a change after the last of {len(target)} elements")
        position, value = position + size, value + values.nbytes


def _num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def _block_sizes(num_blocks: int, size: int) -> np.ndarray:
    """Return the number of elements of each block of a part with `size` elements: int64 [num_blocks]."""
    return np.minimum(BLOCK, size - BLOCK * np.arange(num_blocks, dtype=np.int64))


def _position_bytes(counts: np.ndarray, size: int) -> np.ndarray:
    """Return the number of bytes of each block's positions: int64 [num_blocks]."""
    return np.minimum(2 * counts.astype(np.int64), -(-_block_sizes(len(counts), size) // 8))


def _are_masks(counts: np.ndarray, size: int) -> np.ndarray:
    """Whether the positions of each block are a bit per element: bool [num_blocks]."""
    return _position_bytes(counts, size) < 2 * counts.astype(np.int64)


def _coded(offsets: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """Return the positions of a part's blocks as bytes of the message."""
    are_masks = _are_masks(counts, size)
    if not are_masks.any():
        return offsets.view(np.uint8)
    parts, by_block = list[np.ndarray](), np.split(offsets, np.cumsum(counts)[:-1])
    for block, is_mask, block_size in zip(by_block, are_masks, _block_sizes(len(counts), size), strict=True):
        changed = np.zeros(block_size if is_mask else 0, np.bool_)
        changed[block if is_mask else []] = True
        parts.append(np.packbits(changed) if is_mask else block.view(np.uint8))
    return np.concatenate(parts)


def _decoded(coded: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    """Return the offsets of a part's changes. Raises ValueError if they do not fit the counts."""
    are_masks = _are_masks(counts, size)
    if not are_masks.any():
        return coded.copy().view(np.uint16)
    parts = list[np.ndarray]()
    by_block = np.split(coded, np.cumsum(_position_bytes(counts, size))[:-1])
    for block, count, is_mask in zip(by_block, counts, are_masks, strict=True):
        found = np.flatnonzero(np.unpackbits(block)).astype(np.uint16) if is_mask else block.copy().view(np.uint16)
        _check(len(found) == count, f"a block has {len(found)} changes, not {count}")
        parts.append(found)
    return np.concatenate(parts)


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(f"the message does not fit the old bytes: {problem}")
