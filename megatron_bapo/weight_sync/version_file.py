"""One version of the weights as a safetensors file of whole tensors, which writers fill slice by slice, in place."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_bapo.weight_sync.plan import ITEM_BYTES, Box, Shape, Slice

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


def table_of_contents(shapes: Mapping[str, Shape], dtype: str) -> bytes:
    """What a safetensors file begins with: its length, then JSON, padded to whole words."""
    contents: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        contents[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(contents, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def file_bytes(shapes: Mapping[str, Shape], dtype: str) -> int:
    size = sum(map(math.prod, shapes.values())) * ITEM_BYTES[dtype]
    return len(table_of_contents(shapes, dtype)) + size


def create(path: Path, shapes: Mapping[str, Shape], dtype: str, present: Sequence[str]) -> None:
    """Make the file with room for the tensors in `present`; the others' places are holes.

    An existing file of the right size is taken as it is: its pages are there already, which for fresh ones of shared
    memory takes several times as long as filling them. Raises OSError when there is no room.
    """
    header = table_of_contents(shapes, dtype)
    size = file_bytes(shapes, dtype)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, header, 0)
        end, wanted = len(header), set(present)
        for name, shape in shapes.items():
            start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
            if name in wanted:
                # A page that is missing when a mapping is written to would kill the process.
                os.posix_fallocate(descriptor, start, end - start)
    finally:
        os.close(descriptor)


class VersionWriter:
    """Writes slices into a created file. Closed by `close`."""

    def __init__(self, path: Path, shapes: Mapping[str, Shape], dtype: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._mapping: mmap.mmap | None = mmap.mmap(self._descriptor, 0)
        self._shapes, self._dtype = shapes, dtype
        self._starts: dict[str, int] = {}
        end = len(table_of_contents(shapes, dtype))
        for name, shape in shapes.items():
            self._starts[name] = end
            end += math.prod(shape) * ITEM_BYTES[dtype]

    def write(self, part: Slice, value: torch.Tensor) -> None:
        """`value` is a contiguous tensor in host memory, of the box's shape and the file's dtype."""
        shape = self._shapes[part.name]
        if part.box.shape[1:] == shape[1:]:
            row = math.prod(shape[1:]) * ITEM_BYTES[self._dtype]
            start = self._starts[part.name] + (part.box.start[0] if shape else 0) * row
            _write_all(self._descriptor, raw_bytes(value), start)
        else:
            view_of(self._tensor(part.name), part.box).copy_(value)

    def _tensor(self, name: str) -> torch.Tensor:
        assert self._mapping is not None, "the file is closed"
        shape = self._shapes[name]
        dtype = getattr(torch, self._dtype)
        flat = torch.frombuffer(self._mapping, dtype=dtype, count=math.prod(shape), offset=self._starts[name])
        return flat.view(shape)

    def close(self) -> None:
        self._mapping = None
        os.close(self._descriptor)


class VersionReader:
    """The tensors of a file, memory-mapped: what is never looked at is never read."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, "pt")

    def tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)

    def slice(self, part: Slice) -> torch.Tensor:
        """A contiguous tensor; a view of the mapping where the slice lies in one place."""
        return view_of(self.tensor(part.name), part.box).contiguous()


def view_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous tensor in host memory, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):  # the kernel writes at most 2 GiB at a time
        done += os.pwrite(descriptor, data[done:], start + done)
