"""The safetensors file of one version of the weights: whole tensors, which writers fill in place, slice by slice."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from megatron_bapo.weight_sync.plan import ITEM_BYTES, Box, Shape, Slice

BLOCK_BYTES = 512
"""Unit of `st_blocks`, which does not depend on the file system (stat(2))."""
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


def table_of_contents(shapes: Mapping[str, Shape], dtype: str, in_fp32: Collection[str] = ()) -> bytes:
    """Return the header of a safetensors file: its length, then JSON padded to a multiple of 8 bytes.

    The tensors are in `dtype`, except those in `in_fp32`.
    """
    contents: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        kind = "float32" if name in in_fp32 else dtype
        start, end = end, end + math.prod(shape) * ITEM_BYTES[kind]
        contents[name] = {"dtype": _DTYPES[kind], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(contents, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


def file_bytes(shapes: Mapping[str, Shape], dtype: str) -> int:
    """Return the size of the file in bytes."""
    size = sum(map(math.prod, shapes.values())) * ITEM_BYTES[dtype]
    return len(table_of_contents(shapes, dtype)) + size


def create(path: Path, shapes: Mapping[str, Shape], dtype: str, present: Sequence[str]) -> None:
    """Create the file and allocate space for the tensors in `present`; the other tensors are holes.

    An existing file of the right size is reused, because its pages are already allocated; allocating fresh shared
    memory takes several times as long as writing it. Raises OSError if there is no space.
    """
    header = table_of_contents(shapes, dtype)
    size = file_bytes(shapes, dtype)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
        has_holes = os.fstat(descriptor).st_blocks * BLOCK_BYTES < size
        os.pwrite(descriptor, header, 0)
        if not has_holes:
            return  # posix_fallocate would look at each page
        starts = tensor_starts(shapes, dtype)
        for name in present:
            # Without allocation, writing to a mapping kills the process when memory runs out.
            if num_bytes := math.prod(shapes[name]) * ITEM_BYTES[dtype]:
                os.posix_fallocate(descriptor, starts[name], num_bytes)
    finally:
        os.close(descriptor)


def tensor_starts(shapes: Mapping[str, Shape], dtype: str) -> dict[str, int]:
    """Return the position in the file of each tensor's first byte."""
    starts, end = {}, len(table_of_contents(shapes, dtype))
    for name, shape in shapes.items():
        starts[name] = end
        end += math.prod(shape) * ITEM_BYTES[dtype]
    return starts


class MappedFile:
    """A created file, mapped into memory: its bytes and its slices as tensors that share the file's memory."""

    def __init__(self, descriptor: int, shapes: Mapping[str, Shape], dtype: str) -> None:
        """`descriptor` is of the file, opened for reading and writing; it may be closed afterwards."""
        self._shapes, self._dtype = shapes, dtype
        self._starts = tensor_starts(shapes, dtype)
        self._mapping = mmap.mmap(descriptor, 0)

    def contains(self, shapes: Mapping[str, Shape], dtype: str) -> bool:
        """Whether the file has tensors of these names, shapes and dtype, in this order."""
        return [*self._shapes.items()] == [*shapes.items()] and self._dtype == dtype

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of the file from `start` to `stop`: uint8 [stop - start]."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=stop - start, offset=start)

    def slice(self, part: Slice) -> torch.Tensor:
        """Return a slice, which is a strided view unless the slice is contiguous."""
        shape, dtype = self._shapes[part.name], getattr(torch, self._dtype)
        flat = torch.frombuffer(self._mapping, dtype=dtype, count=math.prod(shape), offset=self._starts[part.name])
        return view_of(flat.view(shape), part.box)

    def span(self, part: Slice) -> tuple[int, int] | None:
        """Return the positions of a contiguous slice's first byte and of the byte after its last; else None."""
        shape, box = self._shapes[part.name], part.box
        if box.shape[1:] != shape[1:]:
            return None
        item_bytes = ITEM_BYTES[self._dtype]
        start = self._starts[part.name] + (box.start[0] if shape else 0) * math.prod(shape[1:]) * item_bytes
        return start, start + box.size * item_bytes


class MappedFiles:
    """Maps the files of a store and keeps the mappings, because the first access to each page of a mapping is slow.

    A store alternates between two files, which are renamed for each version.
    """

    def __init__(self) -> None:
        self._files: dict[int, MappedFile] = {}

    def map(self, path: Path, shapes: Mapping[str, Shape], dtype: str) -> MappedFile:
        """Return the mapping of a created file."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            inode = os.fstat(descriptor).st_ino  # is not reused for another file as long as this one is mapped
            file = self._files.pop(inode, None)
            if file is None or not file.contains(shapes, dtype):
                file = MappedFile(descriptor, shapes, dtype)
        finally:
            os.close(descriptor)
        newest = [*self._files.items()][-1:]
        self._files = dict([*newest, (inode, file)])
        return file


class VersionWriter:
    """Writes slices into a created file until `close` is called."""

    def __init__(self, path: Path, mapped: MappedFile) -> None:
        """`mapped` is the mapping of the file at `path`."""
        self._descriptor, self.mapped = os.open(path, os.O_RDWR | os.O_CLOEXEC), mapped

    def write(self, part: Slice, value: torch.Tensor) -> None:
        """Write a slice; `value` is contiguous, in host memory, and has the box's shape and the file's dtype."""
        if (span := self.mapped.span(part)) is not None:
            # Writing is faster than copying into a mapping, whose pages would be faulted in one by one.
            _write_all(self._descriptor, raw_bytes(value), span[0])
        else:
            self.mapped.slice(part).copy_(value)

    def close(self) -> None:
        os.close(self._descriptor)


class VersionReader:
    """Memory-mapped tensors of a file; only accessed parts are read."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, "pt")

    def tensor(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)

    def slice(self, part: Slice) -> torch.Tensor:
        """Return a slice as a contiguous tensor, which is a view of the mapping if the slice is contiguous."""
        return view_of(self.tensor(part.name), part.box).contiguous()


def view_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of the box of a tensor."""
    for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    # Tensor.numpy() makes a storage non-resizable, but trainer/offload.py resizes storages.
    return np.from_dlpack(tensor.detach().reshape(-1).view(torch.uint8)).data


def _write_all(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):  # the kernel writes at most 2 GiB at a time
        done += os.pwrite(descriptor, data[done:], start + done)
