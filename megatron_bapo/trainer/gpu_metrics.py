"""Metrics of the trainer's GPUs during a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from megatron_bapo.metrics.values import Last, Max, Mean, Metric, Sum, from_vectors, to_vectors
from megatron_bapo.parallel.collectives import max_over, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device, take_peak_memory
from megatron_bapo.parallel.telemetry import GIB, GpuReading, Telemetry


def gpu_step_metrics(telemetry: Telemetry | None, groups: ParallelGroups) -> dict[str, Metric]:
    """Return the metrics of all ranks' GPUs since the last call, equal on every rank; empty without GPUs. Collective.

    Values that no GPU reports are omitted.
    """
    if (peak_memory := take_peak_memory()) is None:
        return {}
    own = gpu_metrics(telemetry.take() if telemetry else [], peak_memory)
    num_ranks = groups.tensor.size * groups.data_context.size * groups.pipeline.size
    return reduce_over_ranks(with_per_rank_metrics(own, groups.global_rank, num_ranks), groups)


def with_per_rank_metrics(metrics: dict[str, Metric], rank: int, num_ranks: int) -> dict[str, Metric]:
    """Return the metrics plus one `.../rank_N` metric per rank: this rank's value here, neutral values for others."""
    if num_ranks == 1:
        return metrics
    by_rank = {
        f"{name}/rank_{other}": metric if other == rank else neutral_value(metric)
        for other in range(num_ranks)
        for name, metric in metrics.items()
    }
    return metrics | by_rank


def reduce_over_ranks(metrics: dict[str, Metric], groups: ParallelGroups) -> dict[str, Metric]:
    """Reduce metrics over every rank of the mesh, not only the last pipeline stage; drop those without a value."""
    axes = groups.tensor, groups.data_context, groups.pipeline
    sums, maxima = (torch.from_numpy(vector).to(local_device()) for vector in to_vectors(metrics))
    sum_over(*axes)(sums)
    max_over(*axes)(maxima)
    found = from_vectors(metrics, sums.cpu().numpy(), maxima.cpu().numpy())
    return {name: metric for name, metric in found.items() if has_value(metric)}


def has_value(metric: Metric) -> bool:
    """Whether the metric contains at least one observation."""
    match metric:
        case Mean(_, weight):
            return weight > 0
        case Max(value) | Last(value):
            return value > -float("inf")
        case Sum():
            return True


def neutral_value(metric: Metric) -> Metric:
    """Return the neutral element of the metric's reduction."""
    match metric:
        case Mean():
            return Mean(0.0, 0.0)
        case Sum():
            return Sum(0.0)
        case Max() | Last():
            return type(metric)(-float("inf"))


def gpu_metrics(readings: Sequence[GpuReading], peak_memory: tuple[int, int] | None) -> dict[str, Metric]:
    """Return the metrics of one rank from its readings of a step and torch's (allocated, reserved) peak bytes.

    Every rank returns the same names. Means are over readings and ranks, maxima show the worst rank, and errors are
    summed over ranks.
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
