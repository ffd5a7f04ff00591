"""Handle SIGINT, SIGTERM, SIGHUP and a job scheduler's SIGUSR1: the first signal asks for a clean stop."""

from __future__ import annotations

import ctypes
import signal
from types import FrameType, TracebackType
from typing import Any, Self

PR_SET_PDEATHSIG = 1
"""Option number from linux/prctl.h."""
STOPPED_AT_ONCE = 131
"""Exit code of a run that a second signal has ended: unlike after the first one, its state is not saved."""


class Interrupts:
    """Context manager that handles these signals, and restores the previous handlers at its end.

    The first signal sets `requested`, the second raises KeyboardInterrupt. A signal that this process was started to
    ignore stays ignored: SIGHUP after `nohup`, and SIGINT in the background of a script.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            for handled in self._previous:  # ignore further signals, so that they do not interrupt the cleanup
                signal.signal(handled, signal.SIG_IGN)
            raise KeyboardInterrupt
        self.requested = True


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies, however it dies (prctl(2)).

    The default is SIGKILL, because a process that waits for a lost host is in a call that no signal handler interrupts.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
