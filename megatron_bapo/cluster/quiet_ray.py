"""Ray's library without the lines that it writes to stderr: what matters is raised as an error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LEVEL = "RAY_BACKEND_LOG_LEVEL"


@contextmanager
def quiet_ray() -> Iterator[None]:
    """Start Ray's library in this context; it then writes fatal errors only, unless the user has chosen another level.

    The library repeats lines about retries on this process's stderr. Given a level, it first writes a line about that,
    which is removed here. A process of its own passes all other lines on, so that none is lost if the library ends this
    process. Nothing that is started in this context may outlive it.
    """
    if LEVEL in os.environ:
        yield
        return
    os.environ[LEVEL] = "fatal"
    sys.stderr.flush()
    stderr = os.dup(2)
    command = ["sed", "--unbuffered", f"/{LEVEL}/d"]
    passing_on = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stderr, start_new_session=True)
    assert passing_on.stdin is not None
    os.dup2(passing_on.stdin.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)
        passing_on.stdin.close()
        passing_on.wait()
