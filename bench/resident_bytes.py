"""Peak bytes of a process's own memory, including the allocations of its threads and all libraries."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path

INTERVAL_S = 0.001


def peak_resident_bytes(task: Callable[[], object]) -> int:
    """Return the peak increase of resident anonymous memory during the task, sampled every millisecond.

    Shared memory and mapped files do not count.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc keeps would hide the task's allocations
    before, peaks, is_done = _anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(INTERVAL_S):
            peaks[0] = max(peaks[0], _anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        task()
    finally:
        is_done.set()
        watcher.join()
    return peaks[0]


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not report RssAnon")
