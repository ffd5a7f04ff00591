"""Input and output of the conversion tools: find the checkpoint, show progress, summarize the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_bapo.config.architecture import written_dtype
from megatron_bapo.config.loading import load_config
from megatron_bapo.errors import UserError
from megatron_bapo.model.megatron_checkpoint import find_megatron_checkpoint
from megatron_bapo.model.weight_copy import Advance, CopyResult
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.trainer.checkpoint import STATE, WEIGHTS, checkpoints

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint with the information that a Hugging Face folder needs besides."""

    checkpoint: Path
    origin: Path
    """Hugging Face folder with config.json and tokenizer, and with the weights that training left as they are."""
    dtype: str
    """dtype of the trained model."""


def find_checkpoint(
    path: Path,
    origin: Path | None,
    dtype: str | None,
    *,
    origin_option: str = "--origin-hf-dir",
    dtype_option: str = "--dtype",
) -> CheckpointSource:
    """Return the checkpoint at `path`, or the newest one if `path` is a run directory.

    `origin` and `dtype` default to those of the run; messages name them `origin_option` and `dtype_option`. Raises
    UserError if there is no checkpoint, or if a checkpoint outside a run directory is given without an origin.
    """
    checkpoint = _checkpoint(path)
    run = RunDirectory(checkpoint.absolute().parent.parent)
    in_run = run.config.is_file() and checkpoint.parent.name == run.checkpoints.name
    # The override makes a moved run directory find the model that it contains.
    config = load_config(run.config, [f"run_dir={json.dumps(str(run.root))}"]) if in_run else None
    hint = ""
    if origin is None and config is not None:
        origin, hint = config.model_path, " (a relative model.path starts at the folder where the run was started)"
    origin = _checked_origin(origin, checkpoint, origin_option, hint)
    dtype = dtype or (config.model.dtype if config else _convertible_dtype(origin, dtype_option))
    return CheckpointSource(checkpoint, origin, dtype)


def find_megatron_source(path: Path, origin: Path | None, dtype: str | None) -> CheckpointSource | None:
    """Return the checkpoint of Megatron-Core at `path`, or the newest one in it; None if there is none.

    `dtype` defaults to that of `origin`. Raises UserError without an origin, and for Megatron's older formats.
    """
    checkpoint = find_megatron_checkpoint(path)
    if checkpoint is None:
        return None
    origin = _checked_origin(origin, checkpoint, "--origin-hf-dir", ", whose weights are not needed")
    return CheckpointSource(checkpoint, origin, dtype or _convertible_dtype(origin, "--dtype"))


def _checked_origin(origin: Path | None, checkpoint: Path, option: str, hint: str) -> Path:
    """Return the origin. Raises UserError without one, or without its config.json."""
    if origin is not None and (origin / "config.json").is_file():
        return origin
    state = f"there is no {origin / 'config.json'}" if origin else f"nothing names the model of {checkpoint}"
    raise UserError(f"{state}; give the Hugging Face folder with its config.json and tokenizer as {option}{hint}")


def _checkpoint(path: Path) -> Path:
    if (path / STATE).is_file() and (path / WEIGHTS).is_dir():
        if path.suffix == ".partial":
            raise UserError(f"{path} was being written and may be incomplete; give a checkpoint without .partial")
        return path
    found = [*checkpoints(path), *checkpoints(RunDirectory(path).checkpoints)]
    if found:
        return found[-1]
    raise UserError(f"{path} {_reason(path)}; give a run directory, or a checkpoint in it (checkpoints/step-N)")


def _reason(path: Path) -> str:
    """Return why a folder is not a checkpoint of this trainer."""
    if not path.is_dir():
        return "is not a folder" if path.exists() else "does not exist"
    if RunDirectory(path).config.is_file():
        return "is a run directory without a complete checkpoint yet"
    if file := next(path.rglob("*.distcp"), None):
        return (
            f"has a checkpoint of Megatron-Core, {file.parent}, which tools/convert_megatron_to_hf.py makes a Hugging "
            "Face folder"
        )
    if (path / "config.json").is_file():
        return "is already a Hugging Face folder"
    return "contains no checkpoint of this trainer (weights/ and state.json)"


def _convertible_dtype(origin: Path, dtype_option: str) -> str:
    """Return the dtype of the origin's weights. Raises UserError for one that is not written here."""
    dtype = written_dtype(origin)
    if dtype not in DTYPES:
        raise UserError(
            f"{origin / 'config.json'} has dtype {dtype!r}; give {dtype_option}, one of {', '.join(DTYPES)}"
        )
    return dtype


@contextmanager
def byte_progress(console: Console, what: str, num_bytes: int) -> Iterator[Advance]:
    """Show a progress bar until `num_bytes` are written and verified; each byte counts twice."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(what, total=2 * num_bytes)
        yield lambda size: progress.advance(task, size)


def summary(copied: CopyResult, dtypes: str, target: Path, verified: str = "bit by bit against the source") -> str:
    """Return one line about the written files and how they were verified."""
    kept = f", {copied.num_kept_files} existed already" if copied.num_kept_files else ""
    files = f"{copied.num_files} file{'s' if copied.num_files > 1 else ''}{kept}"
    return (
        f"{target}: {copied.num_tensors} tensors ({dtypes}), {copied.num_bytes / 2**20:.1f} MiB in {files}; "
        f"verified {verified}"
    )
