"""Functions of the user's: an objective (`algorithm.function`) and an advantage estimator (`algorithm.adv_function`).

`python -m megatron_bapo.algorithm.user_functions KEY path.to.module:function GROUP_SIZE` checks the one of a key: it
prints what is wrong and exits with 1, or with 0 if all is well.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron_bapo.algorithm.objectives import TokenObjective
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.errors import UserError
from megatron_bapo.functions.user_function import Target, load

_OBJECTIVE, _ESTIMATOR = "algorithm.function", "algorithm.adv_function"


@lru_cache
def user_objective(name: str) -> TokenObjective:
    """Return the function `path.to.module:function` as an objective.

    Raises UserError if it cannot be imported or called; the objective raises it for a result that is no value of each
    token.
    """
    arguments = ("log_ratio", "log_probs", "advantages", "low", "high")
    function = _load(_OBJECTIVE, name, arguments)

    def objective(
        log_ratio_T: Tensor, log_probs_T: Tensor, advantages_T: Tensor, low: Tensor, high: Tensor, _: AlgorithmConfig
    ) -> Tensor:
        if not len(log_ratio_T):
            return log_ratio_T
        tensors = log_ratio_T, log_probs_T, advantages_T, low, high
        value_T = function(**dict(zip(arguments, tensors, strict=True)))
        return _of_shape(value_T, log_ratio_T, f"{_OBJECTIVE}={name}", "the value of each token, and not a loss")

    return objective


@lru_cache
def user_advantages(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function as an estimator: (rewards [G, N], lengths [G, N]) -> advantages [G, N], float64.

    Raises UserError if it cannot be imported or called; the estimator raises it for a result that is not finite or not
    an advantage of each response.
    """
    function = _load(_ESTIMATOR, name, ("rewards", "lengths"))

    def estimate(rewards_GN: Tensor, lengths_GN: Tensor) -> Tensor:
        found_GN = function(rewards=rewards_GN, lengths=lengths_GN)
        key = f"{_ESTIMATOR}={name}"
        advantages_GN = _of_shape(found_GN, rewards_GN, key, "the advantage of each response").double()
        if not advantages_GN.isfinite().all():
            group = int(advantages_GN.isfinite().all(dim=1).logical_not().nonzero()[0])
            raise UserError(
                f"{key}: not all advantages are finite for the rewards {rewards_GN[group].tolist()} of a group; see "
                "that nothing is divided by the standard deviation of equal rewards, which is 0"
            )
        return advantages_GN

    return estimate


def _load(key: str, name: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    function = load(Target(f"{key}={name}", name, arguments, returns="values"))
    if function.is_async:
        raise UserError(f"{key}={name} is an async function; write it with def")
    return function.call


def _of_shape(found: Any, expected: Tensor, function: str, meaning: str) -> Tensor:
    is_tensor, shape = isinstance(found, Tensor), list(expected.shape)
    if not is_tensor or found.shape != expected.shape or not found.is_floating_point():
        result = f"a tensor {list(found.shape)} of {found.dtype}" if is_tensor else type(found).__name__
        raise UserError(f"{function} returned {result}; return a floating-point tensor {shape} with {meaning}")
    return found


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
        raise UserError(f"{_OBJECTIVE}={name}: its value has no gradient; compute it from log_ratio or log_probs")
    (gradient_T,) = torch.autograd.grad(value_T.sum(), log_probs_T)
    if not (value_T.isfinite().all() and gradient_T.isfinite().all()):
        raise UserError(
            f"{_OBJECTIVE}={name}: its value or gradient is not finite for ratios from 0.37 to 2.46; see that no "
            "branch of torch.where divides by 0 or overflows"
        )
    parts_T = torch.cat([value_of(slice(0, 7)), value_of(slice(7, None))])
    if not torch.allclose(parts_T, value_T, rtol=1e-5, atol=1e-6):
        raise UserError(
            f"{_OBJECTIVE}={name}: the value of a token depends on other tokens, such as through a mean; return "
            "the value of each token alone, which algorithm.loss_agg_mode sums up"
        )


def check_user_advantages(name: str, group_size: int) -> None:
    """Compute the advantages of groups with one right response, with none and with others only. Raises UserError."""
    rewards_GN = torch.zeros(4, group_size, dtype=torch.float64)
    rewards_GN[0, 0], rewards_GN[1], rewards_GN[2] = 1.0, 1.0, torch.linspace(-1.0, 1.0, group_size)
    user_advantages(name)(rewards_GN, 3 + torch.arange(rewards_GN.numel()).view_as(rewards_GN))


def main(key: str, name: str, group_size: str) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's module prints
            if key == _OBJECTIVE:
                check_user_objective(name)
            else:
                check_user_advantages(name, int(group_size))
    except UserError as error:
        print(error)
        return 1
    except Exception as error:  # the user's function may raise anything
        print(f"{key}={name} raised {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
