"""Memory that was freed goes back to the system, which malloc would keep: responses and texts leave holes in its heap.

Source: `malloc_trim` of glibc's malloc/malloc.c, which returns the whole pages inside every free block.
"""

from __future__ import annotations

import ctypes

HEAP_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 17),
    "MALLOC_ARENA_MAX": "1",
    "NUMPY_MADVISE_HUGEPAGE": "0",
}
"""Environment variables of a process that holds rollouts. glibc gives every larger block back when it is freed, instead
of raising this threshold to 32 MiB, and threads share one heap, so that one fills the holes that another one leaves.
With huge pages, memory at the end of an array that was not written yet would be occupied, and an event loop would wait
while the kernel makes room for them."""
_TRIM_BYTES = 1 << 24
"""Freed bytes after which the heap is trimmed, which takes some milliseconds."""


def release_freed_memory() -> None:
    """Return freed memory to the system; has no effect without glibc."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class FreedMemory:
    """Counts what is freed, and returns it to the system now and then."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that are free now."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _TRIM_BYTES:
            self._num_bytes = 0
            release_freed_memory()
