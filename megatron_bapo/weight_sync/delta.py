"""Lossless differences of two versions of a bucket: which elements changed, and their new bytes.

Elements are compared and copied as integers, so that NaNs and the sign of zero come through. Positions are gaps to the
last change, of one or two bytes each, or one bit an element, whichever is smallest; where the whole bucket is smaller
still, it is sent whole.

    message = kind (1 byte), bytes of an element (1), elements (8), bytes of the positions (8), positions, values
"""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

_HEADER = struct.Struct("<BBQQ")
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BLOCK = 1 << 18


class Kind(IntEnum):
    """How a message says which elements it brings."""

    WHOLE = 0
    GAPS_8 = 1
    GAPS_16 = 2
    MASK = 3


_GAPS = {Kind.GAPS_8: np.uint8, Kind.GAPS_16: np.uint16}


def encode(new: memoryview, old: memoryview | None, item_bytes: int) -> bytes:
    """The smallest message that turns `old`, of as many bytes, into `new`; without `old` the whole of `new`."""
    size = len(new) // item_bytes
    if old is None:
        return _message(Kind.WHOLE, item_bytes, size, b"", new)
    assert len(old) == len(new), f"{len(old)} bytes cannot become {len(new)}"
    after = np.frombuffer(new, _INTEGERS[item_bytes])
    positions = _changes(after, np.frombuffer(old, _INTEGERS[item_bytes]))
    gaps = np.diff(positions, prepend=-1) - 1
    sizes = {kind: _num_codes(gaps, dtype) * dtype().itemsize for kind, dtype in _GAPS.items()}
    sizes[Kind.MASK] = -(-size // 8)
    kind = min(sizes, key=sizes.__getitem__)
    if sizes[kind] + len(positions) * item_bytes >= len(new):
        return _message(Kind.WHOLE, item_bytes, size, b"", new)
    coded = _mask(positions, size) if kind == Kind.MASK else _codes(gaps, _GAPS[kind])
    return _message(kind, item_bytes, size, coded.tobytes(), after[positions].tobytes())


def decode(message: bytes | memoryview, old: memoryview | None) -> memoryview:
    """The new bytes, in the place of the old ones. Raises ValueError for a message that does not fit or was cut."""
    message = memoryview(message)
    kind, item_bytes, size, num_coded = _HEADER.unpack_from(message)
    coded, values = message[_HEADER.size :][:num_coded], message[_HEADER.size + num_coded :]
    if kind == Kind.WHOLE:
        _check(len(values) == size * item_bytes, f"{len(values)} bytes of {size * item_bytes}")
        return values
    if old is None or len(old) != size * item_bytes:
        raise ValueError("not a message for these bytes: the old bytes are of another size, or there are none")
    elements = np.frombuffer(old, _INTEGERS[item_bytes])
    if kind == Kind.MASK:
        positions = np.flatnonzero(np.unpackbits(np.frombuffer(coded, np.uint8), count=size))
    else:
        positions = _positions(np.frombuffer(coded, _GAPS[Kind(kind)]))
    _check(len(values) == len(positions) * item_bytes, f"{len(values)} bytes for {len(positions)} changes")
    _check(len(positions) == 0 or positions[-1] < size, f"a change behind the last of {size} elements")
    elements[positions] = np.frombuffer(values, _INTEGERS[item_bytes])
    return old


def is_whole(message: bytes | memoryview) -> bool:
    return message[0] == Kind.WHOLE


def _message(kind: Kind, item_bytes: int, size: int, coded: bytes, values: bytes | memoryview) -> bytes:
    return b"".join((_HEADER.pack(kind, item_bytes, size, len(coded)), coded, values))


def _changes(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Positions of the elements that differ, a cacheful at a time."""
    blocks = range(0, len(after), _BLOCK)
    found = [np.flatnonzero(after[i : i + _BLOCK] != before[i : i + _BLOCK]) + i for i in blocks]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _mask(positions: np.ndarray, size: int) -> np.ndarray:
    changed = np.zeros(size, np.bool_)
    changed[positions] = True
    return np.packbits(changed)


def _num_codes(gaps: np.ndarray, dtype: type[np.unsignedinteger]) -> int:
    largest = np.iinfo(dtype).max
    return len(gaps) + int((gaps[gaps >= largest] // largest).sum())


def _codes(gaps: np.ndarray, dtype: type[np.unsignedinteger]) -> np.ndarray:
    """The largest value of the type skips as many unchanged elements; a smaller one skips those and names a change."""
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


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(f"not a message for these bytes: {problem}")
