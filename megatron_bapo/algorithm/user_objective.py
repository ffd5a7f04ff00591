"""An objective of the user's own (`algorithm.objective=function`).

`python -m megatron_bapo.algorithm.user_objective path.to.module:function` checks one: it prints what is wrong and exits
with 1, or 0 if all is well.
"""

from __future__ import annotations

import contextlib
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_bapo.algorithm.objectives import TokenObjective
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.errors import UserError
from megatron_bapo.functions.user_function import Target, load

ARGUMENTS = ("log_ratio", "log_probs", "advantages", "low", "high")
"""Tensors [T] of tokens, and the 0-d bounds."""


@lru_cache
def user_objective(name: str) -> TokenObjective:
    """Return the function `path.to.module:function` as an objective.

    Raises UserError if it cannot be imported or called; the objective raises it for a result that is no value of each
    token.
    """
    function = load(Target(f"algorithm.function={name}", name, ARGUMENTS, returns="values"))
    if function.is_async:
        raise UserError(f"algorithm.function={name} is an async function; write it with def")

    def objective(
        log_ratio_T: Tensor, log_probs_T: Tensor, advantages_T: Tensor, low: Tensor, high: Tensor, _: AlgorithmConfig
    ) -> Tensor:
        if not len(log_ratio_T):
            return log_ratio_T
        tensors = log_ratio_T, log_probs_T, advantages_T, low, high
        value_T: Any = function.call(**dict(zip(ARGUMENTS, tensors, strict=True)))
        is_tensor = isinstance(value_T, Tensor)
        if not is_tensor or value_T.shape != log_ratio_T.shape or not value_T.is_floating_point():
            found = f"a tensor {list(value_T.shape)} of {value_T.dtype}" if is_tensor else type(value_T).__name__
            raise UserError(
                f"algorithm.function={name} returned {found} for {len(log_ratio_T)} tokens; return a floating-point "
                f"tensor [{len(log_ratio_T)}] with the value of each token, and not a loss"
            )
        return value_T

    return objective


def check_user_objective(name: str) -> None:
    """Compute the objective of a few tokens, with ratios on both sides of the bounds and advantages of both signs.

    Raises UserError unless each value is finite, has a finite gradient and depends on its own token alone: the loss is
    computed in parts, whose tokens depend on the layout.
    """
    objective, low, high = user_objective(name), torch.tensor(0.8), torch.tensor(1.2)
    advantages_T = torch.tensor([-1.5, -0.5, 0.0, 0.5, 1.5]).repeat_interleave(5)
    behaviour_T = torch.linspace(-3.0, -1.0, len(advantages_T))
    log_probs_T = (behaviour_T + torch.tensor([-1.0, -0.1, 0.0, 0.1, 0.9]).repeat(5)).requires_grad_()

    def value_of(part: slice) -> Tensor:
        log_ratio_T = log_probs_T[part] - behaviour_T[part]
        return objective(log_ratio_T, log_probs_T[part], advantages_T[part], low, high, AlgorithmConfig())

    value_T = value_of(slice(None))
    if not value_T.requires_grad:
        raise UserError(f"algorithm.function={name}: its value has no gradient; compute it from log_ratio or log_probs")
    (gradient_T,) = torch.autograd.grad(value_T.sum(), log_probs_T)
    if not (value_T.isfinite().all() and gradient_T.isfinite().all()):
        raise UserError(
            f"algorithm.function={name}: its value or gradient is not finite for ratios from 0.37 to 2.46; see that no "
            "branch of torch.where divides by 0 or overflows"
        )
    parts_T = torch.cat([value_of(slice(0, 7)), value_of(slice(7, None))])
    if not torch.allclose(parts_T, value_T, rtol=1e-5, atol=1e-6):
        raise UserError(
            f"algorithm.function={name}: the value of a token depends on other tokens, such as through a mean; return "
            "the value of each token alone, which algorithm.loss_agg_mode sums up"
        )


def main(name: str) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's module prints
            check_user_objective(name)
    except UserError as error:
        print(error)
        return 1
    except Exception as error:  # the user's function may raise anything
        print(f"algorithm.function={name} raised {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
