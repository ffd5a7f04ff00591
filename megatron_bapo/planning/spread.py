"""How far planned steps are from published ones: the interval in which a run's step is to be expected."""

from __future__ import annotations

from megatron_bapo.config.architecture import Architecture

STEP_SPREAD = {False: (0.87, 1.10), True: (0.74, 1.08)}
"""Lowest and highest planned over published seconds of an RL step, for models without and with experts, rounded to
hundredths. They come from 8 and 6 published layouts of NeMo-RL on 8 to 256 H100s, each planned with efficiencies that
were estimated without any run of its model (bench.published_folds, whose test compares)."""


def step_range(architecture: Architecture, seconds: float) -> tuple[float, float]:
    """Return the (shortest, longest) seconds of a step that is planned with `seconds`, if it is as far off as those."""
    low, high = STEP_SPREAD[bool(architecture.moe_layers)]
    return seconds / high, seconds / low
