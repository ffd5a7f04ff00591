"""Metrics whose type states how they are reduced over micro-batches, updates and ranks.

`merge` reduces in one process; `to_vectors` and `from_vectors` let the caller reduce a whole dictionary over ranks with
one SUM and one MAX all-reduce. This module uses plain floats and has no collectives.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

Value = TypeVar("Value")
"""Type of a metric's values: float, or a tensor that is still on its device."""


@dataclass(frozen=True)
class Mean(Generic[Value]):
    """Weighted mean, stored as total and weight, e.g. nats and tokens; NaN if the weight is 0."""

    total: Value
    weight: Value


@dataclass(frozen=True)
class Sum(Generic[Value]):
    value: Value


@dataclass(frozen=True)
class Max(Generic[Value]):
    """Maximum; `-inf` on a rank without values."""

    value: Value


@dataclass(frozen=True)
class Last(Generic[Value]):
    """Latest value, equal on every rank, e.g. a learning rate or a clip bound."""

    value: Value


Metric = Mean[float] | Sum[float] | Max[float] | Last[float]
Metrics = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Reduce the metrics of micro-batches or updates in their order; a name need not be in every part."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _combine(name, merged[name], metric) if name in merged else metric
    return merged


def to_vectors(metrics: Metrics) -> tuple[np.ndarray, np.ndarray]:
    """Pack the metrics into a float64 vector to all-reduce with SUM and one to all-reduce with MAX.

    Entries follow the sorted names. The MAX vector starts with a fingerprint of names and reductions and its negative,
    so that `from_vectors` can check that all ranks packed the same metrics.
    """
    fingerprint = _fingerprint(metrics)
    sums: list[float] = []
    maxima = [fingerprint, -fingerprint]
    for _, metric in sorted(metrics.items()):
        match metric:
            case Mean(total, weight):
                sums += [total, weight]
            case Sum(value):
                sums.append(value)
            case Max(value) | Last(value):
                maxima.append(value)
    return np.array(sums, dtype=np.float64), np.array(maxima, dtype=np.float64)


def from_vectors(local: Metrics, sums: np.ndarray, maxima: np.ndarray) -> dict[str, Metric]:
    """Unpack reduced vectors; `local` are the metrics that this rank packed with `to_vectors`."""
    fingerprint = _fingerprint(local)
    assert tuple(maxima[:2]) == (fingerprint, -fingerprint), (
        f"the ranks packed different metrics; this one packed {sorted(local)}"
    )
    next_sum, next_maximum = iter(sums.tolist()), iter(maxima[2:].tolist())
    reduced: dict[str, Metric] = {}
    for name, metric in sorted(local.items()):
        match metric:
            case Mean():
                reduced[name] = Mean(next(next_sum), next(next_sum))
            case Sum():
                reduced[name] = Sum(next(next_sum))
            case Max():
                reduced[name] = Max(next(next_maximum))
            case Last():
                reduced[name] = Last(next(next_maximum))
    return reduced


def scalars(metrics: Metrics) -> dict[str, float]:
    """Return the values to log, sorted by name."""
    return {name: _scalar(metric) for name, metric in sorted(metrics.items())}


def _combine(name: str, first: Metric, second: Metric) -> Metric:
    match first, second:
        case Mean(), Mean():
            return Mean(first.total + second.total, first.weight + second.weight)
        case Sum(), Sum():
            return Sum(first.value + second.value)
        case Max(), Max():
            # Unlike Python's max, np.maximum never hides a NaN.
            return Max(float(np.maximum(first.value, second.value)))
        case Last(), Last():
            return second
    raise AssertionError(f"{name} is {type(first).__name__} in one part and {type(second).__name__} in another")


def _scalar(metric: Metric) -> float:
    if isinstance(metric, Mean):
        return metric.total / metric.weight if metric.weight else float("nan")
    return metric.value


def _fingerprint(metrics: Metrics) -> float:
    schema = "\n".join(f"{name} {type(metric).__name__}" for name, metric in sorted(metrics.items()))
    return float(zlib.crc32(schema.encode()))
