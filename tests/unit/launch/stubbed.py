"""Launch scripts that tests start, with stubs of the programs that they call."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.processes import is_alive

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
        if process.poll() is None:
            kill_all(psutil.Process(process.pid))
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def kill_all(script: psutil.Process) -> None:
    """Kill a script and all that it has started, and wait for their ends; once stopped they start nothing more."""
    found: list[psutil.Process] = []
    while new := [each for each in (script, *script.children(recursive=True)) if each not in found]:
        for each in new:
            with suppress(psutil.NoSuchProcess):  # the scripts' `sleep` ends at any time
                each.suspend()
        found += new
    for each in found:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    deadline = time.monotonic() + LIMIT_S
    while any(map(is_alive, found)):
        assert time.monotonic() < deadline, "killed processes have not ended"
        time.sleep(0.05)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.05)
