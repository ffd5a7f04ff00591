"""The device check and telemetry on the installed driver and GPU."""

import time
from collections.abc import Callable
from dataclasses import asdict

import torch

from bench.results import save
from megatron_bapo.parallel import device_check
from megatron_bapo.parallel.device_check import reading_problems, run_trial, trial_problems
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import host_buffer, local_device, synchronize
from megatron_bapo.parallel.telemetry import start_telemetry
from megatron_bapo.trainer.gpu_metrics import gpu_step_metrics

Figures = Callable[..., None]


def test_this_gpu_passes_the_device_check(figures: Figures) -> None:
    start = time.perf_counter()
    device_check.check_device()
    figures(check_s=time.perf_counter() - start)
    trial = run_trial(local_device(), num_bytes=1 << 30)
    assert list(trial_problems(trial)) == []


def test_a_host_buffer_is_page_locked_and_has_the_size_that_was_asked_for() -> None:
    buffer = host_buffer((1 << 24) + 64)
    assert buffer.is_pinned()
    assert buffer.untyped_storage().size() == (1 << 24) + 64
    values = torch.arange(1 << 22, device=local_device(), dtype=torch.float32)
    copy = buffer[: 1 << 24].view(torch.float32)
    copy.copy_(values, non_blocking=True)
    synchronize()
    assert torch.equal(copy, values.cpu())


def test_telemetry_reads_this_gpu_and_records_the_reading(groups: ParallelGroups, figures: Figures) -> None:
    telemetry = start_telemetry()
    assert telemetry is not None, "nvidia-ml-py is not installed or does not find this GPU"
    matrix, deadline = torch.randn(8192, 8192, device=local_device()), time.monotonic() + 4
    while time.monotonic() < deadline:
        (matrix @ matrix).sum().item()
    readings = telemetry.take()
    telemetry.close()
    assert len(readings) >= 2
    last = readings[-1]
    save("nvml", asdict(last))
    known = {name: value for name, value in asdict(last).items() if isinstance(value, int | float)}
    figures(**known)
    assert list(reading_problems(last)) == []
    assert (last.utilization or 0) > 0.5
    metrics = gpu_step_metrics(None, groups)
    assert metrics["perf/max_memory_allocated_gb"].value > 0.25
    assert "perf/gpu_power_w" not in metrics
