"""The parent process of a worker, which ends the worker together with all processes that the worker has started.

A process can leave its process group and session, and it can outlive its parent. Linux gives an orphan to its nearest
ancestor that is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER). The supervisor is one, so that every descendant of the
worker is its child, or becomes its child when those in between have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from pathlib import Path
from typing import NoReturn

import psutil

LIFELINE = 0
"""File descriptor of a pipe whose other end the pool has: when that is closed, the supervisor ends the worker."""
KILL_LIMIT_S = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def supervise(connection: int) -> None:
    """Fork the worker, and return in it. The calling process becomes its supervisor and ends as the worker ends.

    SIGTERM or the end of the pool's process ends the worker and its descendants. `connection` is a file descriptor that
    only the worker keeps.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    supervisor = os.getpid()
    if worker := os.fork():
        os.close(connection)
        _exit_as(_wait(worker, signals))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.close(signals)
    os.close(wakeup)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, LIFELINE)
    os.close(null)


def _wait(worker: int, signals: int) -> int | None:
    """Return the worker's wait status when all of its descendants have ended, None if it has not ended itself."""
    poll = select.poll()
    poll.register(LIFELINE, select.POLLIN)
    poll.register(signals, select.POLLIN)
    statuses: dict[int, int] = {}
    while worker not in statuses:
        events = dict(poll.poll())
        received = os.read(signals, 4096) if signals in events else b""
        statuses |= _reap()
        if LIFELINE in events or signal.SIGTERM in received:
            break
    end_s = time.monotonic() + KILL_LIMIT_S
    while (children := _children()) and time.monotonic() < end_s:
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
        statuses |= _reap()
    return statuses.get(worker)


def _reap() -> dict[int, int]:
    """Return the wait statuses of the children that have ended since the last call, by process id."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    return statuses


def _children() -> list[int]:
    try:
        return [int(child) for child in Path("/proc/thread-self/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [child.pid for child in psutil.Process().children()]


def _exit_as(status: int | None) -> NoReturn:
    """End as the worker did, so that the pool can report its exit code or signal."""
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker may have written one
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
