"""What a run was started with: version and commit of this package, and the trainer's hardware."""

from __future__ import annotations

import os
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_bapo.metrics.sinks import JsonlSink, StartRow
from megatron_bapo.run_directory import RunDirectory

_PACKAGE = Path(__file__).resolve().parents[1]
_GIT_TIMEOUT_S = 10.0


def record_start(directory: RunDirectory, device: str | None, world_size: int) -> None:
    """Append a row about this start; `device` is the name of the trainer's GPUs, None without them."""
    row: StartRow = {
        "time_s": time.time(),
        "version": _version(),
        "commit": commit(_PACKAGE.parent),
        "hardware": f"{world_size} × {device}" if device is not None else _processor(),
    }
    with JsonlSink(directory.starts) as starts:
        starts.write(row)


def commit(checkout: Path) -> str | None:
    """Return the commit of a git checkout, with `-dirty` if files are changed; None if the folder is none."""
    top = _git(checkout, "rev-parse", "--show-toplevel")
    if top is None or Path(top) != checkout.resolve():  # a package that is installed inside another project
        return None
    return _git(checkout, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version() -> str | None:
    try:
        return version("megatron-bapo")
    except PackageNotFoundError:
        return None


def _processor() -> str:
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return cores
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{cores}, {names[0]}" if names else cores
