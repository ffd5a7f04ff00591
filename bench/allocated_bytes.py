"""Peak bytes that PyTorch's CPU allocator has allocated, including workspaces inside operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(task: Callable[[], object], mapped_files: Iterable[Path] = ()) -> int:
    """Return the peak of the bytes allocated during the task; its result is dropped.

    Mapping a safetensors file into memory counts as an allocation, although its pages belong to the page cache.
    Therefore allocations with the size of one of `mapped_files`, which are listed after the task, do not count.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        task()
    sizes = {file.stat().st_size for file in mapped_files}
    profiler = recorded.profiler
    assert profiler is not None
    results = profiler.kineto_results
    assert results is not None
    # torch's type stub of the class lacks nbytes.
    events: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(change for change in changes if abs(change) not in sizes), default=0)
