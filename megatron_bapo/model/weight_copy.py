"""Copies tensors with Hugging Face names into files of another folder, one at a time, verified and resumable."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megatron_bapo.errors import RunError, UserError
from megatron_bapo.model.hf_export import write_safetensors
from megatron_bapo.model.hf_import import SafetensorsFolder
from megatron_bapo.model.hf_mapping import Shape
from megatron_bapo.model.stacked_experts import Tensors

Advance = Callable[[int], object]
"""Progress callback; called with the bytes of a tensor when it is written and again when it is compared."""


@dataclass(frozen=True)
class CopyResult:
    """Contents of a copy, all of which have been compared with the source."""

    num_tensors: int
    num_bytes: int
    num_files: int
    num_kept_files: int
    """Number of files that an earlier call had already written."""


def plan_files(shapes: dict[str, Shape], itemsize: int, max_file_bytes: int) -> list[dict[str, Shape]]:
    """Assign tensors to files in order; a file exceeds the limit only if a single tensor does."""
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
    source: Tensors,
    shapes: dict[str, Shape],
    folder: Path,
    dtype: torch.dtype,
    *,
    max_file_bytes: int,
    advance: Advance,
    in_fp32: Collection[str] = (),
) -> CopyResult:
    """Write the tensors named in `shapes` to `folder` as `dtype`, skipping files that already have the right bits.

    Tensors in `in_fp32`, which are the last ones, are written in fp32. Every file is read back and compared with its
    source, including files of an interrupted call. Memory usage is two tensors, excluding the mapped files. Raises
    RunError if a written file differs from its source.
    """
    files, num_kept = plan_files(shapes, dtype.itemsize, max_file_bytes), 0
    paths = [folder / f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for leftover in set(folder.glob("*.safetensors*")) - set(paths):
        leftover.unlink()  # from a call with another file size, or partially written
    for path, part in zip(paths, files, strict=True):
        kinds = {name: torch.float32 if name in in_fp32 else dtype for name in part}
        if _has_tensors(path, source, kinds, lambda _: None):
            advance(2 * sum(kinds[name].itemsize * math.prod(shape) for name, shape in part.items()))
            num_kept += 1
            continue
        unfinished = path.with_name(path.name + ".partial")
        tensors = ((name, _read(source, name, kind, advance)) for name, kind in kinds.items())
        write_safetensors(unfinished, part, tensors, in_fp32)
        if not _has_tensors(unfinished, source, kinds, advance):
            raise RunError(f"{unfinished} differs from what was written to it; check the disk, then run this again")
        unfinished.rename(path)
    return CopyResult(len(shapes), total_bytes(shapes, dtype, in_fp32), len(files), num_kept)


def total_bytes(shapes: dict[str, Shape], dtype: torch.dtype, in_fp32: Collection[str] = ()) -> int:
    """Return the bytes of tensors in `dtype`, except those in `in_fp32`."""
    return sum(
        math.prod(shape) * (torch.float32 if name in in_fp32 else dtype).itemsize for name, shape in shapes.items()
    )


def first_difference(
    written: SafetensorsFolder,
    source: Tensors,
    shapes: dict[str, Shape],
    dtype: torch.dtype,
    advance: Advance,
    in_fp32: Collection[str] = (),
) -> str | None:
    """Return the first tensor that `written` lacks, or has with other bits than `source` as `dtype`, or has in excess.

    Tensors in `in_fp32` are compared in fp32. Returns None if there is no difference.
    """
    found = written.shapes()
    for name in shapes:
        kind = torch.float32 if name in in_fp32 else dtype
        if name not in found or not _same_bits(written.slice(name)[:], _read(source, name, kind, advance)):
            return name
    return next(iter(found.keys() - shapes), None)


def _read(source: Tensors, name: str, dtype: torch.dtype, advance: Advance) -> torch.Tensor:
    original = source.slice(name)[:]
    tensor = original.to(dtype)
    if dtype == torch.float16 and (tensor.isinf() & ~original.isinf()).any():
        raise UserError(f"{name} has values above 65504, which float16 cannot represent; write bfloat16")
    advance(tensor.numel() * tensor.itemsize)
    return tensor


def _has_tensors(path: Path, source: Tensors, kinds: dict[str, torch.dtype], advance: Advance) -> bool:
    """Whether the file contains exactly the tensors in `kinds`, in these dtypes, with the bits of the source."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys()) == set(kinds) and all(
                _same_bits(file.get_tensor(name), _read(source, name, kind, advance)) for name, kind in kinds.items()
            )
    except SafetensorError:
        return False


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits; unlike `torch.equal`, NaN equals itself and 0.0 differs from -0.0."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
