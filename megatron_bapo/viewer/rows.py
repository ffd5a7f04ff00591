"""The rows of a run's JSON lines files, as the viewer needs them. Each function raises for what is not such a row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron_bapo.metrics.sinks import MetricsRow

MAX_NAME = 200
_MAX_TEXT, _MAX_REASON, _MAX_FAILURES = 1000, 500, 5
_LARGEST = 1 << 53
"""Whole numbers up to this one have a float each."""


class Request(NamedTuple):
    """A request that an engine answered."""

    engine: str
    sent_s: float
    answered_s: float
    step: int
    serial: int
    num_tokens: int
    num_responses: int


def metrics_row(row: Mapping[str, Any]) -> MetricsRow:
    metrics = {name: None if value is None else float(value) for name, value in row["metrics"].items()}
    known = MetricsRow(step=_whole(row["step"]), phase=row["phase"], time_s=_finite(row["time_s"]), metrics=metrics)
    if row.get("unix_s") is not None:
        known["unix_s"] = _finite(row["unix_s"])
    return known


def request(row: Mapping[str, Any]) -> Request:
    num_tokens = row["num_tokens"]
    numbers = row["step"], row["prompt_serial"], sum(num_tokens), len(num_tokens)
    return Request(str(row["engine"]), _finite(row["sent_s"]), _finite(row["answered_s"]), *map(_whole, numbers))


def quarantined_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt_id": str(row["prompt_id"])[:MAX_NAME],
        "failures": [str(each)[:_MAX_TEXT] for each in list(row["failures"])[:_MAX_FAILURES]],
    }


def engine_event(row: Mapping[str, Any]) -> dict[str, Any]:
    return _event(row, "engine", str(row["event"]), row["reason"]) | {"engine": str(row["engine"])[:MAX_NAME]}


def restart(row: Mapping[str, Any]) -> dict[str, Any]:
    return _event(row, "restart", f"the run restarted after step {row['step']}", row["reason"])


def start(row: Mapping[str, Any]) -> dict[str, Any]:
    reason = f"{row['hardware']}; commit {row['commit']}, version {row['version']}"
    return _event(row, "start", "the trainer started", reason)


def _event(row: Mapping[str, Any], kind: str, text: str, reason: object) -> dict[str, Any]:
    time_s = _finite(row["time_s"])
    return {"time_s": time_s, "kind": kind, "text": text[:MAX_NAME], "reason": str(reason)[:_MAX_REASON]}


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return float(value)


def _whole(value: Any) -> int:
    if not abs(value) <= _LARGEST:
        raise ValueError(f"{value} is too large")
    return int(value)
