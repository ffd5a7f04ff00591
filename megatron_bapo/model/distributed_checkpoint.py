"""Reads tensors of a `torch.distributed.checkpoint` folder by name, in one process, and runs nothing that it contains.

PyTorch's own reader unpickles `.metadata` with every class that the file names, and needs the packages of whoever wrote
it. Here no class of the file is imported: its objects become records of attributes, and the tensors are read with
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import itertools
import math
import pickle
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_mapping import Shape

METADATA = ".metadata"
"""File that says which part of which tensor is where; it is written last."""


@dataclass(frozen=True, eq=False, slots=True)
class _Chunk:
    """A box of a tensor, and where its bytes are."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, whose first dims may stack tensors that are read one by one."""

    folder: Path
    name: str
    shape: Shape
    """Shape of what is read."""
    chunks: dict[Shape, list[_Chunk]]
    """Chunks with a part of each stacked tensor, by its index in the first dims."""
    _kept: dict[_Chunk, torch.Tensor] = field(default_factory=dict, init=False)
    """Chunks with parts of several stacked tensors, of which the last one was read."""

    def read(self, index: Shape = ()) -> torch.Tensor:
        """Return the stacked tensor at `index`, or the whole tensor. Raises UserError if a chunk is damaged."""
        chunks, whole = self.chunks[index], None
        for chunk in self._kept.keys() - chunks:
            del self._kept[chunk]
        for chunk in chunks:
            values = self._kept[chunk] if chunk in self._kept else self._load(chunk)
            if math.prod(chunk.sizes[: len(index)]) > 1:
                self._kept[chunk] = values
            part = values[tuple(number - offset for number, offset in zip(index, chunk.offsets, strict=False))]
            whole = part.new_empty(self.shape) if whole is None else whole
            spans = zip(chunk.offsets[len(index) :], part.shape, strict=True)
            whole[tuple(slice(offset, offset + size) for offset, size in spans)] = part
        assert whole is not None
        return whole

    def _load(self, chunk: _Chunk) -> torch.Tensor:
        try:
            with (self.folder / chunk.file).open("rb") as file:
                file.seek(chunk.start)
                values = torch.load(BytesIO(file.read(chunk.num_bytes)), map_location="cpu", weights_only=True)
            if tuple(values.shape) == chunk.sizes:
                return values
            reason = f"it has the shape {list(values.shape)} instead of {list(chunk.sizes)}"
        except _UNREADABLE as error:
            reason = str(error) or type(error).__name__
        raise UserError(
            f"{self.folder / chunk.file}: a part of {self.name} cannot be read ({reason}); copy the checkpoint again"
        )


class DistributedCheckpoint:
    """Tensors of one folder. Raises UserError if its `.metadata` cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _parsing(folder):
            metadata = _unpickle((folder / METADATA).read_bytes())
            self._tensors = {
                name: item for name, item in metadata.state_dict_metadata.items() if hasattr(item, "chunks")
            }
            self._shapes = {name: _size(tensor.size) for name, tensor in self._tensors.items()}
            self._stored: dict[str, list[tuple[Any, Any]]] = {name: [] for name in self._tensors}
            for index, stored in metadata.storage_data.items():
                if index.fqn in self._stored:
                    self._stored[index.fqn].append((index, stored))

    def shapes(self) -> dict[str, Shape]:
        """Return name -> shape of the tensors; other objects are left out."""
        return self._shapes

    def tensor(self, name: str, num_stacked: int = 0) -> StoredTensor:
        """Return a tensor whose first `num_stacked` dims stack others. Raises UserError if a part of it is missing."""
        stack, shape = self._shapes[name][:num_stacked], self._shapes[name][num_stacked:]
        with _parsing(self.folder):
            found: dict[Shape, list[_Chunk]] = {index: [] for index in itertools.product(*map(range, stack))}
            for chunk in self._chunks(name):
                spans = zip(chunk.offsets[:num_stacked], chunk.sizes, strict=False)
                for index in itertools.product(*(range(offset, offset + size) for offset, size in spans)):
                    found[index].append(chunk)
        for index, chunks in found.items():
            num_found = sum(math.prod(chunk.sizes[num_stacked:]) for chunk in chunks)
            overlaps = itertools.starmap(_overlap, itertools.combinations(chunks, 2))
            if not chunks or num_found != math.prod(shape) or any(overlaps):
                raise UserError(
                    f"{self.folder} has {num_found} of the {math.prod(shape)} values of {name}{list(index) or ''}; "
                    "copy the checkpoint again"
                )
        return StoredTensor(self.folder, name, shape, found)

    def _chunks(self, name: str) -> Iterator[_Chunk]:
        shape = self._shapes[name]
        sizes = {_size(chunk.offsets): _size(chunk.sizes) for chunk in self._tensors[name].chunks}
        for index, stored in self._stored[name]:
            offsets, file = _size(index.offset), stored.relative_path
            if "/" in file:
                raise ValueError(f"{file} is not a file of the folder")
            if getattr(stored, "transform_descriptors", None):
                raise ValueError(f"{name} is stored with {stored.transform_descriptors}")
            if any(o < 0 or o + s > n for o, s, n in zip(offsets, sizes[offsets], shape, strict=True)):
                raise ValueError(f"{name} has a part outside of its shape")
            yield _Chunk(offsets, sizes[offsets], file, int(stored.offset), int(stored.length))


def _overlap(one: _Chunk, other: _Chunk) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(a, b) < min(a + m, b + n) for a, m, b, n in spans)


@contextmanager
def _parsing(folder: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        raise UserError(f"{folder / METADATA} cannot be read ({error!r}); copy the checkpoint again") from None


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


_STACK_PER_TUPLE = 128
"""Bytes of C stack for hashing a tuple, which are needed for each level of nested ones; Python 3.11 takes 56."""


def _unpickle(data: bytes) -> Any:
    """Unpickle in a thread with the stack that hashing all tuples of the pickle takes if they are nested.

    Python does not limit that depth, and a stack that is too small ends the process.
    """
    num_tuples = sum(map(data.count, (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE)))
    previous_size = threading.stack_size((1 << 20) + _STACK_PER_TUPLE * num_tuples)
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(_Unpickler(BytesIO(data)).load).result()
    finally:
        threading.stack_size(previous_size)


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
