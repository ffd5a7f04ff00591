"""Log files of the run's processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def redirect_output(log_file: Path) -> None:
    """Append everything that this process prints to `log_file`, including the output of native code."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def last_lines(log_file: Path, num: int) -> str:
    """Return the last `num` lines of a log that are not blank; empty if there is no such file."""
    if not log_file.is_file():
        return ""
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-num:])
