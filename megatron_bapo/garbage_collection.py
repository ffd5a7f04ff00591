"""Garbage collection that neither slows imports down nor stops an event loop for long.

A full collection visits every living object: a tenth of a second for 200,000 of them, which is what the scheduler holds
for 16,384 responses. Rollouts leave no reference cycles, so their objects are freed without the collector. Objects that
have survived the collections of young ones are therefore exempt from later ones.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MAX_MORE_EXEMPT = 4_000_000
"""Exempt objects, more than after the last full collection, at which there is another one: it bounds the memory that
cycles of old objects can take, and rollouts never have so many objects."""
_THRESHOLDS = 700, 10, 1 << 30
"""Thresholds of the collector: young objects are collected as usual, and there is no automatic full collection."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while many objects are made, and exempt what imports leave from later collections.

    Imports create up to half a million objects that live as long as the process. Searching for garbage among them takes
    a fifth of the time of the imports, and 0.3 s of each full collection afterwards. Nothing is exempted if all modules
    were imported before.
    """
    was_enabled, num_modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:
            gc.freeze()
        if was_enabled:
            gc.enable()


class GarbageCollector:
    """Collects young objects and exempts old ones, for the whole process."""

    def __init__(self) -> None:
        """Do a full collection and exempt what is left; to be called before the event loop has work."""
        gc.set_threshold(*_THRESHOLDS)
        self._collect_all()

    def exempt_survivors(self) -> None:
        """Collect young objects, which takes milliseconds, and exempt what is left."""
        gc.collect(1)
        gc.freeze()
        if gc.get_freeze_count() > self._num_exempt + MAX_MORE_EXEMPT:
            self._collect_all()

    def _collect_all(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._num_exempt = gc.get_freeze_count()
