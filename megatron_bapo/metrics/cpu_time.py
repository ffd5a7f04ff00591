"""How much of a machine's cores one side of a run takes."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def family_cpu_s() -> float:
    """CPU seconds so far of the process that started this one, and of all below it.

    For a trainer rank these are torchrun and its ranks, for a Ray actor this machine's other actors with what they
    started. The time of a process that has ended is its parent's.
    """
    seconds = 0.0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(os.getppid())
        for process in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:4])
    return seconds
