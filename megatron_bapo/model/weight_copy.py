"""Copies Hugging Face-named tensors into files of another folder: one at a time, compared bit by bit, continued."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_bapo.errors import RunError
from megatron_bapo.model.hf_export import write_safetensors
from megatron_bapo.model.hf_import import SafetensorsFolder
from megatron_bapo.model.hf_mapping import Shape

Advance = Callable[[int], object]
"""Told the bytes of a tensor once it is written and once it is compared."""


@dataclass(frozen=True)
class Copied:
    """What a copy consists of; all of it has been compared with its source."""

    num_tensors: int
    num_bytes: int
    num_files: int
    num_kept_files: int
    """Those that an earlier call had written."""


def plan_files(shapes: dict[str, Shape], itemsize: int, max_file_bytes: int) -> list[dict[str, Shape]]:
    """Tensors file by file, in order; only one that is too large by itself makes a file larger than the limit."""
    files: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * itemsize
        if files[-1] and size + num_bytes > max_file_bytes:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += num_bytes
    return files


def copy_tensors(
    source: SafetensorsFolder,
    shapes: dict[str, Shape],
    folder: Path,
    dtype: torch.dtype,
    *,
    max_file_bytes: int,
    advance: Advance,
) -> Copied:
    """Write the tensors named in `shapes` to `folder` as `dtype`, where a file is not there already, bit for bit.

    Every file is read again and compared with its source, those of an interrupted call as well. Memory is two tensors,
    the mapped files not counted. Raises RunError when a written file does not hold what was written.
    """
    files, num_kept = plan_files(shapes, dtype.itemsize, max_file_bytes), 0
    paths = [folder / f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for leftover in set(folder.glob("*.safetensors*")) - set(paths):
        leftover.unlink()  # of a call with another file size, or one that was half written
    for path, part in zip(paths, files, strict=True):
        if _holds(path, source, part, dtype, lambda _: None):
            advance(2 * dtype.itemsize * sum(map(math.prod, part.values())))
            num_kept += 1
            continue
        unfinished = path.with_name(path.name + ".partial")
        write_safetensors(unfinished, part, ((name, _read(source, name, dtype, advance)) for name in part))
        if not _holds(unfinished, source, part, dtype, advance):
            raise RunError(f"{unfinished} does not hold what was written to it; check the disk, then run this again")
        unfinished.rename(path)
    num_bytes = dtype.itemsize * sum(map(math.prod, shapes.values()))
    return Copied(len(shapes), num_bytes, len(files), num_kept)


def first_difference(
    written: SafetensorsFolder,
    source: SafetensorsFolder,
    shapes: dict[str, Shape],
    dtype: torch.dtype,
    advance: Advance,
) -> str | None:
    """The first of the tensors that `written` lacks or holds other bits of than `source` as `dtype`; None if none."""
    found = written.shapes()
    for name in shapes:
        if name not in found or not _same_bits(written.slice(name)[:], _read(source, name, dtype, advance)):
            return name
    return next(iter(found.keys() - shapes), None)


def _read(source: SafetensorsFolder, name: str, dtype: torch.dtype, advance: Advance) -> torch.Tensor:
    tensor = source.slice(name)[:].to(dtype)
    advance(tensor.numel() * tensor.itemsize)
    return tensor


def _holds(path: Path, source: SafetensorsFolder, part: dict[str, Shape], dtype: torch.dtype, advance: Advance) -> bool:
    """Whether the file holds these tensors and no others, with the source's bits."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys()) == set(part) and all(
                _same_bits(file.get_tensor(name), _read(source, name, dtype, advance)) for name in part
            )
    except SafetensorError:
        return False


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Unlike `torch.equal`, NaN is like itself and zero unlike minus zero."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
