"""Reads tensors of a `torch.distributed.checkpoint` folder by name, in one process, and runs nothing that it contains.

PyTorch's own reader unpickles `.metadata` with every class that the file names, and needs the packages of whoever wrote
it. Here no class of the file is imported: its objects become records of attributes, and the tensors are read with
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from megatron_bapo.errors import UserError
from megatron_bapo.garbage_collection import collector_paused
from megatron_bapo.model.hf_mapping import Shape

METADATA = ".metadata"
"""File that says which part of which tensor is where; it is written last."""


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, and where its bytes are."""

    offsets: Shape
    sizes: Shape
    file: Path
    start: int
    num_bytes: int

    def load(self, name: str) -> torch.Tensor:
        try:
            with self.file.open("rb") as file:
                file.seek(self.start)
                tensor = torch.load(BytesIO(file.read(self.num_bytes)), map_location="cpu", weights_only=True)
            if tuple(tensor.shape) == self.sizes:
                return tensor
            reason = f"it has the shape {list(tensor.shape)} instead of {list(self.sizes)}"
        except _UNREADABLE as error:
            reason = str(error) or type(error).__name__
        raise UserError(f"{self.file}: a part of {name} cannot be read ({reason}); copy the checkpoint again")


class DistributedCheckpoint:
    """Tensors of one folder. Raises UserError if its `.metadata` cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            with (folder / METADATA).open("rb") as file, collector_paused():
                metadata = _Unpickler(file).load()
                self._shapes = _shapes(metadata)
                self._chunks = _chunks(metadata, self._shapes, folder)
        except _UNREADABLE as error:
            raise UserError(f"{folder / METADATA} cannot be read ({error!r}); copy the checkpoint again") from None

    def shapes(self) -> dict[str, Shape]:
        """Return name -> shape of the tensors; other objects are left out."""
        return self._shapes

    def read(self, name: str, index: Shape = ()) -> torch.Tensor:
        """Return `tensor[index]`, reading only the chunks that have a part of it.

        `index` has the numbers of the first dims. Raises UserError if a part of the tensor is missing or damaged.
        """
        shape = self._shapes[name][len(index) :]
        chunks = self._at(name, len(index)).get(index, ())
        num_found = sum(math.prod(chunk.sizes[len(index) :]) for chunk in chunks)
        if (
            not chunks
            or num_found != math.prod(shape)
            or any(itertools.starmap(_overlap, itertools.combinations(chunks, 2)))
        ):
            raise UserError(
                f"{self.folder} has {num_found} of the {math.prod(shape)} values of {name}{list(index) or ''}; "
                "copy the checkpoint again"
            )
        whole = None
        for chunk in chunks:
            inside = (number - offset for number, offset in zip(index, chunk.offsets, strict=False))
            part = chunk.load(name)[tuple(inside)]
            whole = part.new_empty(shape) if whole is None else whole
            spans = zip(chunk.offsets[len(index) :], part.shape, strict=True)
            whole[tuple(slice(offset, offset + size) for offset, size in spans)] = part
        assert whole is not None
        return whole

    @cache  # noqa: B019 (an instance is as long-lived as its process)
    def _at(self, name: str, num_dims: int) -> dict[Shape, list[_Chunk]]:
        """Return the chunks of a tensor by the numbers in its first dims."""
        found: dict[Shape, list[_Chunk]] = {}
        for chunk in self._chunks[name]:
            spans = zip(chunk.offsets[:num_dims], chunk.sizes, strict=False)
            for index in itertools.product(*(range(offset, offset + size) for offset, size in spans)):
                found.setdefault(index, []).append(chunk)
        return found


def _overlap(one: _Chunk, other: _Chunk) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in spans)


class _Record:
    """An object of a pickle, with its attributes and arguments and without its class."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore the content of a mapping."""

    def extend(self, values: Iterable[Any]) -> None:
        """Ignore the content of a sequence."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> type[_Record]:
        return _Record


_UNREADABLE = (
    OSError,
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What unpickling raises for a damaged file, and reading for one of another format."""


def _size(size: _Record) -> Shape:
    """Return a torch.Size."""
    (numbers,) = size.args
    return tuple(int(number) for number in numbers)


def _shapes(metadata: Any) -> dict[str, Shape]:
    return {name: _size(item.size) for name, item in metadata.state_dict_metadata.items() if hasattr(item, "chunks")}


def _chunks(metadata: Any, shapes: dict[str, Shape], folder: Path) -> dict[str, list[_Chunk]]:
    sizes = {
        (name, _size(chunk.offsets)): _size(chunk.sizes)
        for name in shapes
        for chunk in metadata.state_dict_metadata[name].chunks
    }
    found: dict[str, list[_Chunk]] = {name: [] for name in shapes}
    files: dict[str, Path] = {}
    for index, stored in metadata.storage_data.items():
        if index.fqn not in shapes:
            continue
        offsets = _size(index.offset)
        name = stored.relative_path
        if name not in files:
            if Path(name).name != name:
                raise ValueError(f"{name} is not a file of the folder")
            files[name] = folder / name
        if getattr(stored, "transform_descriptors", None):
            raise ValueError(f"{index.fqn} is stored with {stored.transform_descriptors}")
        chunk = _Chunk(offsets, sizes[index.fqn, offsets], files[name], int(stored.offset), int(stored.length))
        if any(o < 0 or o + s > n for o, s, n in zip(offsets, chunk.sizes, shapes[index.fqn], strict=True)):
            raise ValueError(f"{index.fqn} has a part outside of its shape")
        found[index.fqn].append(chunk)
    return found
