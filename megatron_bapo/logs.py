"""Log files of the run's processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def redirect_output(log_file: Path) -> None:
    """Append everything that this process prints, native code included, to `log_file`."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def last_lines(log_file: Path, num: int) -> str:
    """The end of a log, for an error message; empty when there is none."""
    if not log_file.is_file():
        return ""
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-num:])
