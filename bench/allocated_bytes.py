"""Bytes that PyTorch's CPU allocator has given out at once, what operators use inside themselves included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(task: Callable[[], object], mapped_files: Iterable[Path] = ()) -> int:
    """The most that was allocated during the task and not before; what it returns is dropped.

    Mapping a safetensors file into memory counts as allocating it, though its pages belong to the system's cache: the
    files among `mapped_files`, looked for when the task is done, are left out.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        task()
    sizes = {file.stat().st_size for file in mapped_files}
    profiler = recorded.profiler
    assert profiler is not None
    results = profiler.kineto_results
    assert results is not None
    # nbytes is not in torch's stub of the class.
    events: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(change for change in changes if abs(change) not in sizes), default=0)
