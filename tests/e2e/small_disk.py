"""A small file system that a test can fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_FILLING = ".filling"


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """Mount a file system of `mib` MiB at `folder` for this context; the test is skipped where mounting is refused."""
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", folder]
    if subprocess.run(mounting, capture_output=True, timeout=30).returncode != 0:
        pytest.skip("a file system of a given size needs root, e.g. in a privileged container")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=30)


def fill(disk: Path) -> None:
    """Write until nothing more can be written."""
    with (disk / _FILLING).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    file.write(b"-" * size)


def free(disk: Path) -> None:
    (disk / _FILLING).unlink()
