"""Shared parts of the GPU benchmarks: GPU check, timing, peak performance and a process group of one rank."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.report import medians_s, report
from bench.results import save
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.parallel.groups import ParallelGroups, create_groups
from megatron_bapo.parallel.platform import has_gpu, local_device, now_s, start_distributed
from megatron_bapo.planning.hardware import Assumptions

MATRIX_SIZE = 8192
COPIED_BYTES = 4 << 30
LONGEST = Assumptions(mean_prompt_fraction=1.0, mean_response_fraction=1.0, length_sigma=0.0)
"""For plans of batches whose prompts and responses all have their maximum length."""


def require_gpu() -> None:
    if not has_gpu():
        raise SystemExit("this benchmark needs a GPU, and none is found; `make bench` runs the CPU benchmarks")


def seconds_of(tasks: Mapping[str, Callable[[], object]], *, num_repeats: int = 5) -> dict[str, float]:
    """Return the median seconds of each task, including the device's queued work."""
    return medians_s(tasks, num_repeats=num_repeats, num_warmups=2, clock=now_s)


def report_and_save(
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    ratios: dict[str, float],
    figures: dict[str, float],
) -> None:
    """Print the report and save ratios and figures with package versions to results/gpu/."""
    report(name, columns, rows, ratios=ratios, figures=figures)
    save(name, {"ratios": ratios, "figures": figures})


def matrix_flops(size: int = MATRIX_SIZE) -> float:
    """Return the FLOP/s of bfloat16 matrix products, the ceiling of a train step at this GPU's current temperature."""
    left, right = torch.randn(2, size, size, device=local_device()).bfloat16()
    out = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(10):
            torch.mm(left, right, out=out)

    return 20 * size**3 / seconds_of({"products": multiply})["products"]


def copy_bytes_per_s(num_bytes: int = COPIED_BYTES) -> float:
    """Return the bytes that a copy on the device reads and writes per second."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=local_device())
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of({"copy": lambda: target.copy_(source)})["copy"]


@contextmanager
def one_rank() -> Iterator[tuple[ParallelGroups, Path]]:
    """Yield the process groups of one rank and a temporary folder."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        start_distributed(timeout_s=60.0, store_file=root / "rendezvous")
        try:
            yield create_groups(ParallelConfig(), seed=0, timeout_s=60.0), root
        finally:
            torch.distributed.destroy_process_group()
