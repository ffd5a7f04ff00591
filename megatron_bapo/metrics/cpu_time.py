"""CPU time that one part of a run (trainer or rollouts) uses on its machine."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil


def family_cpu_s() -> float:
    """Return the CPU seconds used so far by this process's parent and all of the parent's descendants.

    For a trainer rank these are torchrun and its ranks; for a Ray actor, this machine's other actors and their child
    processes. The time of a process that has ended counts for its parent.
    """
    seconds = 0.0
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(os.getppid())
        for process in [parent, *parent.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                seconds += sum(process.cpu_times()[:4])
    return seconds
