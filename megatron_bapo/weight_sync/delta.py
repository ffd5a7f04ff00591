"""Lossless differences between two versions of a bucket: which elements changed, and their new bytes.

Elements are compared and copied as integers, which preserves NaNs and the sign of zero. Both sides work on blocks of
`BLOCK` elements, which stay in the processor's cache. The positions in a block are offsets of two bytes or one bit per
element, whichever is smaller.

    message = bytes per element (1), blocks (8), changes of each block (4 each), positions of each block, values
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence

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
    counts, positions, values = list[int](), list[np.ndarray](), list[np.ndarray]()
    limit, size = sum(map(len, new)), _HEADER.size
    for after, before in zip(_blocks(new, item_bytes), _blocks(old, item_bytes), strict=True):
        offsets, changed = _changes(after, before)
        coded = _mask(offsets, len(after)) if _is_mask(len(offsets), len(after)) else offsets
        counts.append(len(offsets))
        positions.append(coded.view(np.uint8))
        values.append(changed.view(np.uint8))
        size += 4 + coded.nbytes + changed.nbytes
        if size >= limit:
            return None
    if size >= limit:
        return None
    header = np.frombuffer(_HEADER.pack(item_bytes, len(counts)), np.uint8)
    return np.concatenate([header, np.array(counts, np.uint32).view(np.uint8), *positions, *values])


def decode(
    message: memoryview,
    new: Sequence[Part],
    old: Sequence[Part],
    on_block: Callable[[memoryview], object] = lambda block: None,
) -> None:
    """Write the new bytes to the parts `new`, which have the sizes of `old`; each written block goes to `on_block`.

    Raises ValueError if the message does not fit the old bytes.
    """
    item_bytes, num_blocks = _HEADER.unpack_from(message)
    targets, sources = list(_blocks(new, item_bytes)), _blocks(old, item_bytes)
    _check(num_blocks == len(targets), f"it has {num_blocks} blocks, not {len(targets)}")
    counts = np.frombuffer(message, np.uint32, num_blocks, _HEADER.size).tolist()
    position = _HEADER.size + 4 * num_blocks
    sizes = [_position_bytes(count, len(block)) for count, block in zip(counts, targets, strict=True)]
    value = position + sum(sizes)
    expected = value + sum(counts) * item_bytes
    _check(len(message) == expected, f"it has {len(message)} bytes, not {expected}")
    for target, source, count, size in zip(targets, sources, counts, sizes, strict=True):
        np.copyto(target, source)
        target[_offsets(message[position : position + size], count, len(target))] = np.frombuffer(
            message, target.dtype, count, value
        )
        on_block(target.data.cast("B"))
        position, value = position + size, value + count * item_bytes


def _blocks(parts: Iterable[Part], item_bytes: int) -> Iterator[np.ndarray]:
    for part in parts:
        elements = np.frombuffer(part, _INTEGERS[item_bytes])
        yield from (elements[start : start + BLOCK] for start in range(0, len(elements), BLOCK))


def _changes(after: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets and the new values of the elements of a block that differ.

    Compares words of 8 bytes first, and then only the elements of those that differ.
    """
    per_word = 8 // after.itemsize
    if len(after) != len(before) or len(after) % per_word:
        offsets = np.flatnonzero(after != before).astype(np.uint16)
        return offsets, after[offsets]
    new, old = after.view(np.uint64), before.view(np.uint64)
    words = np.flatnonzero(new != old)
    found = new.take(words)
    values = found.view(after.dtype)
    elements = np.flatnonzero(values != old.take(words).view(after.dtype))
    word_offsets = (words * per_word).astype(np.uint16)
    offsets = word_offsets.take(elements >> per_word.bit_length() - 1) + (elements & per_word - 1).astype(np.uint16)
    return offsets, values.take(elements)


def _position_bytes(num_changes: int, size: int) -> int:
    return min(2 * num_changes, -(-size // 8))


def _is_mask(num_changes: int, size: int) -> bool:
    return _position_bytes(num_changes, size) < 2 * num_changes


def _mask(offsets: np.ndarray, size: int) -> np.ndarray:
    changed = np.zeros(size, np.bool_)
    changed[offsets] = True
    return np.packbits(changed)


def _offsets(coded: memoryview, num_changes: int, size: int) -> np.ndarray:
    """Return the offsets of a block's changes. Raises ValueError if they do not fit a block of this size."""
    if _is_mask(num_changes, size):
        offsets = np.flatnonzero(np.unpackbits(np.frombuffer(coded, np.uint8), count=size))
    else:
        offsets = np.frombuffer(coded, np.uint16)
    _check(len(offsets) == num_changes, f"a block has {len(offsets)} changes, not {num_changes}")
    _check(not num_changes or int(offsets.max()) < size, f"it has a change after the last of {size} elements")
    return offsets


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(f"the message does not fit the old bytes: {problem}")
