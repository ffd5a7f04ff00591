"""The learning rate of each update: a pure function, so a continued run needs no scheduler state."""

from __future__ import annotations

import math

from megatron_bapo.config.schema import OptimizerConfig


def learning_rate(settings: OptimizerConfig, update: int, num_updates: int) -> float:
    """The rate of one update, counted from 0, in a run of `num_updates`.

    A linear warm-up, then Megatron's decay styles down to `min_lr` at `lr_decay_steps` (by default the run's end).
    Megatron's OptimizerParamScheduler begins at rate 0, where an update teaches nothing; here everything comes one
    update earlier.
    """
    peak, floor, num_warmup = settings.lr, settings.min_lr, settings.lr_warmup_steps
    if update < num_warmup:
        return peak * (update + 1) / (num_warmup + 1)
    if settings.lr_decay_style == "constant":
        return peak
    end = settings.lr_decay_steps or num_updates
    if update > end:
        return floor
    if settings.lr_decay_style == "inverse-square-root":
        return max(floor, peak * math.sqrt((num_warmup + 1) / (update + 1)))
    return floor + (peak - floor) * _share_left(settings, update, num_warmup, end)


def _share_left(settings: OptimizerConfig, update: int, start: int, end: int) -> float:
    """How much of the way from `lr` down to `min_lr` is left at an update between `start` and `end`."""
    style = settings.lr_decay_style
    if style == "WSD":
        assert settings.lr_wsd_decay_steps is not None, "the schema asks for it"
        style, start = settings.lr_wsd_decay_style, end - settings.lr_wsd_decay_steps
    done = min(max((update - start) / max(end - start, 1), 0.0), 1.0)
    if style == "linear":
        return 1.0 - done
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if style == "exponential":
        return 2.0 * 0.5**done - 1.0
    return 1.0 - math.sqrt(done)
