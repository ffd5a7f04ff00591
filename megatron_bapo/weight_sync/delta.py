"""Lossless differences between two versions of a bucket: which elements changed, and their new bytes.

Elements are compared and copied as integers, which preserves NaNs and the sign of zero. Positions are encoded as gaps
to the previous change, of one or two bytes each, or as one bit per element, whichever is smallest.

    message = kind (1 byte), bytes per element (1), elements (8), bytes of the positions (8), positions, values
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

_HEADER = struct.Struct("<BBQQ")
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK = 1 << 18


class Kind(IntEnum):
    """Encoding of the positions in a message."""

    GAPS_8 = 1
    GAPS_16 = 2
    MASK = 3


_GAPS = {Kind.GAPS_8: np.uint8, Kind.GAPS_16: np.uint16}


def encode(new: memoryview, old: memoryview, item_bytes: int) -> bytes | None:
    """Return the smallest message that turns `old` into `new`, of the same size; None if it would not be smaller."""
    assert len(old) == len(new), f"{len(old)} bytes cannot become {len(new)}"
    size = len(new) // item_bytes
    after = np.frombuffer(new, _INTEGERS[item_bytes])
    positions = _changes(after, np.frombuffer(old, _INTEGERS[item_bytes]))
    gaps = np.diff(positions, prepend=-1) - 1
    sizes = {kind: _num_codes(gaps, dtype) * dtype().itemsize for kind, dtype in _GAPS.items()}
    sizes[Kind.MASK] = -(-size // 8)
    kind = min(sizes, key=sizes.__getitem__)
    if _HEADER.size + sizes[kind] + len(positions) * item_bytes >= len(new):
        return None
    coded = _mask(positions, size) if kind == Kind.MASK else _codes(gaps, _GAPS[kind])
    header = _HEADER.pack(kind, item_bytes, size, coded.nbytes)
    return b"".join((header, coded.tobytes(), after[positions].tobytes()))


def decode(message: bytes | memoryview, old: memoryview) -> memoryview:
    """Return the new bytes, written over the old ones. Raises ValueError if the message does not fit them."""
    message = memoryview(message)
    kind, item_bytes, size, num_coded = _HEADER.unpack_from(message)
    coded, values = message[_HEADER.size :][:num_coded], message[_HEADER.size + num_coded :]
    if len(old) != size * item_bytes:
        raise ValueError(f"the message does not fit the old bytes: they are {len(old)}, not {size * item_bytes} bytes")
    elements = np.frombuffer(old, _INTEGERS[item_bytes])
    if kind == Kind.MASK:
        positions = np.flatnonzero(np.unpackbits(np.frombuffer(coded, np.uint8), count=size))
    else:
        positions = _positions(np.frombuffer(coded, _GAPS[Kind(kind)]))
    _check(len(values) == len(positions) * item_bytes, f"it has {len(values)} bytes for {len(positions)} changes")
    _check(len(positions) == 0 or positions[-1] < size, f"it has a change after the last of {size} elements")
    elements[positions] = np.frombuffer(values, _INTEGERS[item_bytes])
    return old


def _changes(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the positions of the elements that differ, comparing one cache-sized block at a time."""
    blocks = range(0, len(after), _BLOCK)
    found = [_changes_in_block(after[i : i + _BLOCK], before[i : i + _BLOCK]) + i for i in blocks]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _changes_in_block(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Compare words of 8 bytes first, and then only the elements of those that differ."""
    per_word = 8 // after.itemsize
    if len(after) % per_word:
        return np.flatnonzero(after != before)
    words = np.flatnonzero(after.view(np.uint64) != before.view(np.uint64))
    elements = (words[:, None] * per_word + np.arange(per_word)).reshape(-1)
    return elements[after[elements] != before[elements]]


def _mask(positions: np.ndarray, size: int) -> np.ndarray:
    changed = np.zeros(size, np.bool_)
    changed[positions] = True
    return np.packbits(changed)


def _num_codes(gaps: np.ndarray, dtype: type[np.unsignedinteger]) -> int:
    largest = np.iinfo(dtype).max
    return len(gaps) + int((gaps[gaps >= largest] // largest).sum())


def _codes(gaps: np.ndarray, dtype: type[np.unsignedinteger]) -> np.ndarray:
    """Encode gaps: the largest value of the type skips that many unchanged elements; smaller values end at a change."""
    largest = np.iinfo(dtype).max
    num_skips = np.zeros(len(gaps), np.int64)
    is_long = gaps >= largest
    num_skips[is_long] = gaps[is_long] // largest
    codes = np.full(len(gaps) + int(num_skips.sum()), largest, dtype)
    codes[np.cumsum(num_skips + 1) - 1] = gaps - num_skips * largest
    return codes


def _positions(codes: np.ndarray) -> np.ndarray:
    is_change = codes != np.iinfo(codes.dtype).max
    return (np.cumsum(codes, dtype=np.int64) + np.cumsum(is_change))[is_change] - 1


def _check(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(f"the message does not fit the old bytes: {problem}")
