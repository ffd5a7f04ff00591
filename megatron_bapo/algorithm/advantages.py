"""Advantage estimators over the rewards of a rollout batch, and reward shaping.

Shapes: G groups, N trajectories per group, B = G N trajectories, T response tokens of all trajectories, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from megatron_bapo.algorithm.user_functions import user_advantages
from megatron_bapo.config.algorithm import AlgorithmConfig

STD_EPSILON: Final = 1e-6
"""`epsilon` of verl's `compute_grpo_outcome_advantage`."""
VARIANCE_EPSILON: Final = 1e-8
"""Epsilon of verl's `masked_whiten`."""
ROUNDING: Final = 1e-12
"""Rewards of a group are equal if they differ by no more than this share of the largest."""


def estimate_advantages(
    settings: AlgorithmConfig,
    rewards_GN: Tensor,
    lengths_GN: Tensor,
    penalties: Tensor | None,
    *,
    num_accepted: Tensor | None = None,
) -> Tensor:
    """Return the advantage of each trajectory, float64 [B], from rewards, lengths and penalties.

    Penalties (of a KL term in the reward) are subtracted from the reward of the trajectory, and given as their sum [B];
    under `reinforce_plus_plus`, tokens have advantages of their own then (`token_returns`). `num_accepted` are the
    numbers of tokens [B] that rollout correction accepts, by default all; it affects whitening only.
    """
    if penalties is not None:
        rewards_GN = rewards_GN - penalties.view_as(rewards_GN)
    counts = lengths_GN.flatten() if num_accepted is None else num_accepted
    match settings.adv_estimator:
        case "grpo":
            return group_relative_advantages(rewards_GN, norm_by_std=settings.norm_adv_by_std).flatten()
        case "rloo":
            return leave_one_out_advantages(rewards_GN).flatten()
        case "reinforce_plus_plus":
            return whiten(rewards_GN.flatten(), counts)
        case "reinforce_plus_plus_baseline":
            return whiten(group_relative_advantages(rewards_GN, norm_by_std=False).flatten(), counts)
        case "function":
            return user_advantages(settings.adv_function or "")(rewards_GN, lengths_GN).flatten()


def token_returns(rewards_B: Tensor, penalties_T: Tensor, lengths: list[int]) -> Tensor:
    """Return the return [T] from each token on: the reward minus the penalties of this token and of all later ones.

    `whiten` makes REINFORCE++ advantages of them. `lengths` are those of the B trajectories.
    """
    parts = zip(rewards_B, penalties_T.split(lengths), strict=True)
    returns = [reward - part.flip(0).cumsum(0).flip(0) for reward, part in parts]
    return torch.cat([penalties_T[:0], *returns])


def group_relative_advantages(rewards_GN: Tensor, *, norm_by_std: bool) -> Tensor:
    """Return GRPO advantages [G, N]: reward minus group mean, divided by the group standard deviation if `norm_by_std`.

    Source: arXiv 2402.03300, section 4.1.2; without the standard deviation, Dr. GRPO (arXiv 2503.20783). The standard
    deviation is the unbiased one plus 1e-6, as in verl (`core_algos.py`). A group of rewards that are equal up to
    rounding, such as 0.3 and 0.1 + 0.2, gets exactly 0, and so does a group of one.
    """
    # In floating point the mean of equal rewards may differ from them; the mean of zeros is exactly zero.
    relative_GN = rewards_GN - rewards_GN[:, :1]
    rounding_G1 = ROUNDING * rewards_GN.abs().amax(dim=1, keepdim=True)
    relative_GN = relative_GN.masked_fill(relative_GN.abs() <= rounding_G1, 0.0)
    centred_GN = relative_GN - relative_GN.mean(dim=1, keepdim=True)
    if not norm_by_std:
        return centred_GN
    variance_G1 = centred_GN.square().sum(dim=1, keepdim=True) / max(rewards_GN.shape[1] - 1, 1)
    return centred_GN / (variance_G1.sqrt() + STD_EPSILON)


def leave_one_out_advantages(rewards_GN: Tensor) -> Tensor:
    """Return RLOO advantages [G, N]: reward minus the mean of the other rewards (arXiv 2402.14740, section 2.3).

    This equals N / (N - 1) times the difference from the group mean. A group of one gets 0.
    """
    num = rewards_GN.shape[1]
    return group_relative_advantages(rewards_GN, norm_by_std=False) * (num / max(num - 1, 1))


def whiten(values: Tensor, counts: Tensor, total: Callable[[Tensor], Tensor] = torch.sum) -> Tensor:
    """Return REINFORCE++ advantages: values normalized over all tokens of the batch (arXiv 2501.03262).

    The values are returns-to-go (reward minus the sum of the penalties from this token on) or, with a baseline, the
    differences of the rewards from their group means. Each value is that of `counts` tokens: those of a trajectory, or
    one. The values may be those of a part of the batch if `total` returns sums over all of it.

    Every token has equal weight, and the variance is the unbiased one plus 1e-8, as in verl. Rejected tokens do not
    count, and a value without any other is 0: in verl, rejection changes the response mask
    (`compute_rollout_correction_and_add_to_batch` in `verl/trainer/ppo/rollout_corr_helper.py`) before the advantages
    are computed (`fit` in `verl/trainer/ppo/ray_trainer.py`), which `masked_whiten` normalizes over that mask.
    """
    num_tokens = total(counts)
    centred = values
    for _ in range(2):  # what rounding leaves of equal values after the first time is exactly 0 after the second
        centred = centred - total(centred * counts) / num_tokens
    variance = total(centred.square() * counts) / (num_tokens - 1).clamp(min=1)
    return (centred / (variance + VARIANCE_EPSILON).sqrt()).masked_fill(counts == 0, 0.0)


def positive_factor(positive_sum: float, negative_sum: float, min_share: float) -> float:
    """Return the factor of positive advantages with which their share is `min_share`; 1 if it is that high already.

    The sums are those of w|A| over the tokens of a minibatch with A > 0 and with A < 0, so that the share is that of
    the loss at ratio 1. Without positive tokens no factor gives them a share, and it is 1.
    """
    needed = negative_sum * min_share / (1.0 - min_share)
    return needed / positive_sum if 0.0 < positive_sum < needed else 1.0


def overlong_penalty(lengths_GN: Tensor, max_response_length: int, buffer_length: int, penalty_factor: float) -> Tensor:
    """Return DAPO's soft overlong punishment [G, N], which is added to the rewards.

    The value is min(0, (max_response_length - buffer_length - length) / buffer_length) * penalty_factor
    (arXiv 2503.14476, Eq. 13, where the factor is 1): 0 up to the buffer, then linear down to -penalty_factor for a
    response that fills the buffer.
    """
    left_GN = (max_response_length - buffer_length - lengths_GN.double()) / buffer_length
    return left_GN.clamp(max=0.0) * penalty_factor
