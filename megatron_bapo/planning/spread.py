"""How far planned steps are from published ones: the interval in which a run's step is to be expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_bapo.planning.plan import Plan

STEP_SPREAD = {False: (0.87, 1.07), True: (0.79, 1.11)}
"""Lowest and highest planned over published seconds of an RL step, for models without and with experts, rounded
outwards to hundredths. They come from 8 and 10 published layouts of NeMo-RL on 8 to 512 H100s, each planned with
efficiencies that were estimated without any run of its model (bench.published_folds, whose test compares)."""
PUBLISHED: dict[str, Any] = {
    "broadcasts_weights": True,
    "reference_on_host": True,
    "unpinned_gb_s": 2.8,
    "engine_waits": True,
    "decode_overhead_ms": 4,
}
"""Assumptions about the runs of `STEP_SPREAD`: every engine GPU receives all weights, host memory is not pinned, and
engines schedule no step ahead."""


def step_range(plan: Plan) -> tuple[float, float]:
    """Return the (shortest, longest) seconds of the planned step, if it is as far off as those.

    No published run moves weights and generates as this trainer does, so the longest step has `PUBLISHED` where that
    takes longer.
    """
    low, high = STEP_SPREAD[bool(plan.architecture.moe_layers)]
    published = replace(plan, assumptions=replace(plan.assumptions, **PUBLISHED))
    return plan.time.total / high, max(plan.time.total, published.time.total) / low
