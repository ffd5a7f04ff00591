"""Ctrl-C, SIGTERM, a scheduler's SIGUSR1 and a closed terminal: first a clean stop is asked for, then one at once."""

from __future__ import annotations

import ctypes
import signal
from types import FrameType, TracebackType
from typing import Any, Self

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


class Interrupts:
    """Catches them while it is entered; the previous handlers come back afterwards."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            for each in self._previous:  # what follows is cleaning up, which nothing may cut short
                signal.signal(each, signal.SIG_IGN)
            raise KeyboardInterrupt
        self.requested = True


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """This process gets the signal when its parent dies, however it dies (prctl(2)).

    A gentler one does not reach what waits for a lost host: that is in a call that no signal handler interrupts.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
