"""Peak bytes of a process's own memory, including the allocations of its threads and all libraries."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_bapo.freed_memory import release_freed_memory

INTERVAL_S = 0.001


def peak_resident_bytes(task: Callable[[], object]) -> int:
    """Return the peak increase of resident anonymous memory during the task, sampled every millisecond.

    Shared memory and mapped files do not count.
    """
    forget_freed_memory()
    before, peaks, is_done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(INTERVAL_S):
            peaks[0] = max(peaks[0], anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        task()
    finally:
        is_done.set()
        watcher.join()
    return peaks[0]


def forget_freed_memory() -> None:
    """Return freed memory to the system, because it would hide later allocations."""
    gc.collect()
    release_freed_memory()


def anonymous_bytes(process: int | str = "self") -> int:
    """Return the bytes of resident anonymous memory of a process, this one or another one by its id."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not report RssAnon")
