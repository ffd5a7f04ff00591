"""Learning rate schedule as a pure function of the update, so a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from megatron_bapo.config.optimizer import OptimizerConfig


def learning_rate(settings: OptimizerConfig, update: int, num_updates: int) -> float:
    """Return the learning rate of one update, counted from 0, in a run of `num_updates`.

    The schedule is a linear warm-up followed by one of Megatron's decay styles, which reaches `min_lr` at
    `lr_decay_steps` (default: the end of the run). It is one update ahead of Megatron's OptimizerParamScheduler, whose
    first update has rate 0 and therefore no effect.
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
    """Return the remaining fraction of the decay from `lr` to `min_lr` at an update between `start` and `end`."""
    style = settings.lr_decay_style
    if style == "WSD":
        assert settings.lr_wsd_decay_steps is not None, "lr_decay_style WSD needs lr_wsd_decay_steps"
        style, start = settings.lr_wsd_decay_style, end - settings.lr_wsd_decay_steps
    done = min(max((update - start) / max(end - start, 1), 0.0), 1.0)
    if style == "linear":
        return 1.0 - done
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    if style == "exponential":
        return 2.0 * 0.5**done - 1.0
    return 1.0 - math.sqrt(done)
