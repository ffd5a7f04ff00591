"""What the trainer's GPUs did during a step, as metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron_bapo.metrics.values import Last, Max, Mean, Metric, Sum, from_vectors, to_vectors
from megatron_bapo.parallel.collectives import max_over, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device, take_peak_memory
from megatron_bapo.parallel.telemetry import GIB, GpuReading, Telemetry


def gpu_step_metrics(telemetry: Telemetry | None, groups: ParallelGroups) -> dict[str, Metric]:
    """What all ranks' GPUs did since the last call, the same on every rank; nothing without GPUs. Collective.

    What no GPU tells is left out.
    """
    if (peak_memory := take_peak_memory()) is None:
        return {}
    own = gpu_metrics(telemetry.take() if telemetry else [], peak_memory)
    num_ranks = groups.tensor.size * groups.data_context.size * groups.pipeline.size
    return reduced_over_ranks(with_each_rank(own, groups.global_rank, num_ranks), groups)


def with_each_rank(metrics: dict[str, Metric], rank: int, num_ranks: int) -> dict[str, Metric]:
    """The metrics, and beside them each rank's own as `.../rank_N`: this rank's here, nothing seen of the others'."""
    if num_ranks == 1:
        return metrics
    by_rank = {
        f"{name}/rank_{other}": metric if other == rank else unseen(metric)
        for other in range(num_ranks)
        for name, metric in metrics.items()
    }
    return metrics | by_rank


def reduced_over_ranks(metrics: dict[str, Metric], groups: ParallelGroups) -> dict[str, Metric]:
    """Over every rank of the mesh, not only those of the last pipeline stage; without what no rank has seen."""
    axes = groups.tensor, groups.data_context, groups.pipeline
    sums, maxima = (torch.from_numpy(vector).to(local_device()) for vector in to_vectors(metrics))
    sum_over(*axes)(sums)
    max_over(*axes)(maxima)
    found = from_vectors(metrics, sums.cpu().numpy(), maxima.cpu().numpy())
    return {name: metric for name, metric in found.items() if seen(metric)}


def seen(metric: Metric) -> bool:
    match metric:
        case Mean(_, weight):
            return weight > 0
        case Max(value) | Last(value):
            return value > -float("inf")
        case Sum():
            return True


def unseen(metric: Metric) -> Metric:
    """What adds nothing to a metric of this kind."""
    match metric:
        case Mean():
            return Mean(0.0, 0.0)
        case Sum():
            return Sum(0.0)
        case Max() | Last():
            return type(metric)(-float("inf"))


def gpu_metrics(readings: Sequence[GpuReading], peak_memory: tuple[int, int] | None) -> dict[str, Metric]:
    """One rank's readings of a step, and torch's own (allocated, reserved) peak bytes; every rank has the same names.

    Means are over readings and ranks, maxima show the worst rank, errors are summed over ranks.
    """

    def known(field: str) -> list[float]:
        return [value for reading in readings if (value := getattr(reading, field)) is not None]

    def mean(values: Iterable[float]) -> Mean:
        values = list(values)
        return Mean(sum(values), len(values))

    def largest(values: Iterable[float]) -> Max:
        return Max(max(values, default=-float("inf")))

    allocated, reserved = peak_memory or (0, 0)
    return {
        "perf/gpu_utilization": mean(known("utilization")),
        "perf/gpu_memory_used_gib": largest(known("memory_used_gib")),
        "perf/gpu_power_w": mean(known("power_w")),
        "perf/gpu_temperature_c": largest(known("temperature_c")),
        "perf/gpu_sm_clock_mhz": mean(known("sm_clock_mhz")),
        "perf/gpu_slowed": mean(float(bool(reading.slowdowns)) for reading in readings),
        "perf/gpu_ecc_corrected": Sum(sum(known("corrected_ecc")[-1:])),
        "perf/gpu_ecc_uncorrected": Sum(sum(known("uncorrected_ecc")[-1:])),
        "perf/max_memory_allocated_gb": Max(allocated / GIB),
        "perf/max_memory_reserved_gb": Max(reserved / GIB),
    }
