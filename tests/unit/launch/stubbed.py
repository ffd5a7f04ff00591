"""Launch scripts that tests start, with stubs of the programs that they call."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

LAUNCH = Path(__file__).parents[3] / "launch"
LIMIT_S = 120
"""Timeout of a script that ends within seconds on an idle machine."""


def write_token(path: Path) -> Path:
    path.touch(mode=0o600)
    path.write_text("s3cret")
    return path


def executable(path: Path, script: str) -> Path:
    path.write_text(script)
    path.chmod(0o755)
    return path


@contextmanager
def running(command: list[Path | str], environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """Start the command in its own session; remaining processes are killed at the end."""
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            each.kill()
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.05)
