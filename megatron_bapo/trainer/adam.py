"""AdamW whose moments take half the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

CHUNK = 1 << 22
"""Elements that are in float32 at a time."""


class Bfloat16MomentsAdamW(torch.optim.AdamW):
    """torch's AdamW for float32 parameters, with both moments in bfloat16 between the updates.

    An update is torch's fused one in float32, after which the new moments are rounded to the nearest bfloat16.
    DeepSeek-V3 was trained with moments in bfloat16 (arXiv 2412.19437, section 3.3.3). The states `exp_avg`,
    `exp_avg_sq` and `step` must exist.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "no closure is used here"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        for values, gradient, *moments in zip(*(each.view(-1).split(CHUNK) for each in tensors), strict=True):
            mean, square = (moment.float() for moment in moments)
            adamw(
                *([values], [gradient], [mean], [square], [], [state["step"].clone()]),
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for moment, new in zip(moments, (mean, square), strict=True):
                moment.copy_(new)
        state["step"] += 1
