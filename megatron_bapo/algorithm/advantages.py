"""Advantages from the rewards of a rollout batch, and the rewards' own shaping.

Shapes: G groups, N trajectories per group, T response tokens of all trajectories, one after another.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from megatron_bapo.config.algorithm import AdvEstimator

STD_EPSILON: Final = 1e-6
"""verl's `epsilon` in `compute_grpo_outcome_advantage`."""
VARIANCE_EPSILON: Final = 1e-8
"""verl's, in `masked_whiten`."""


def estimate_advantages(
    estimator: AdvEstimator, rewards_GN: Tensor, lengths_GN: Tensor, penalties_T: Tensor | None, *, norm_by_std: bool
) -> Tensor:
    """Advantages of every response token [T] from the trajectories' rewards and lengths and the tokens' penalties.

    Penalties (of a KL in the reward) are subtracted from the trajectory's reward; under `reinforce_plus_plus` from that
    of their own and of every earlier token. `norm_by_std` concerns `grpo` alone.
    """
    lengths = lengths_GN.flatten()
    penalties_T = torch.zeros(int(lengths.sum()), dtype=rewards_GN.dtype) if penalties_T is None else penalties_T
    parts = penalties_T.split(lengths.tolist())
    if estimator == "reinforce_plus_plus":
        to_go_T = torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])
        return whitened(rewards_GN.flatten().repeat_interleave(lengths) - to_go_T)
    rewards_GN = rewards_GN - torch.stack([part.sum() for part in parts]).view_as(rewards_GN)
    match estimator:
        case "grpo":
            advantages_GN = group_relative_advantages(rewards_GN, norm_by_std=norm_by_std)
        case "rloo":
            advantages_GN = leave_one_out_advantages(rewards_GN)
        case "reinforce_plus_plus_baseline":
            advantages_GN = group_relative_advantages(rewards_GN, norm_by_std=False)
    advantages_T = advantages_GN.flatten().repeat_interleave(lengths)
    return whitened(advantages_T) if estimator == "reinforce_plus_plus_baseline" else advantages_T


def group_relative_advantages(rewards_GN: Tensor, *, norm_by_std: bool) -> Tensor:
    """GRPO's advantages [G, N]: reward minus its group's mean, over its group's standard deviation if `norm_by_std`.

    arXiv 2402.03300, section 4.1.2; without the standard deviation Dr. GRPO's (arXiv 2503.20783). The standard
    deviation is the unbiased one plus 1e-6, as in verl (`core_algos.py`). A group of equal rewards, and so a group of
    one, gets exactly 0.
    """
    # In floating point the mean of equal rewards need not equal them; the mean of zeros does.
    relative_GN = rewards_GN - rewards_GN[:, :1]
    centred_GN = relative_GN - relative_GN.mean(dim=1, keepdim=True)
    if not norm_by_std:
        return centred_GN
    variance_G1 = centred_GN.square().sum(dim=1, keepdim=True) / max(rewards_GN.shape[1] - 1, 1)
    return centred_GN / (variance_G1.sqrt() + STD_EPSILON)


def leave_one_out_advantages(rewards_GN: Tensor) -> Tensor:
    """RLOO's advantages [G, N]: reward minus the mean of the group's others (arXiv 2402.14740, section 2.3).

    That is N / (N - 1) times the distance from the group's mean. A group of one gets 0.
    """
    num = rewards_GN.shape[1]
    return group_relative_advantages(rewards_GN, norm_by_std=False) * (num / max(num - 1, 1))


def whitened(values_T: Tensor) -> Tensor:
    """REINFORCE++'s advantages [T]: the batch's token values, normalised over all of them (arXiv 2501.03262).

    Values are returns to go, r - sum of the penalties from the token on, or with a baseline the rewards' distances from
    their groups' means. Every token counts once and the variance is the unbiased one plus 1e-8, as in verl.
    """
    centred_T = values_T - values_T.mean()
    return centred_T / (centred_T.square().sum() / max(len(values_T) - 1, 1) + VARIANCE_EPSILON).sqrt()


def overlong_penalty(lengths_GN: Tensor, max_response_length: int, buffer_length: int, penalty_factor: float) -> Tensor:
    """DAPO's soft overlong punishment [G, N], to be added to the rewards: 0 up to the buffer, then falling evenly.

    min(0, (max_response_length - buffer_length - length) / buffer_length) x penalty_factor (arXiv 2503.14476, Eq. 13,
    where the factor is 1); an answer that fills the buffer gets -penalty_factor.
    """
    left_GN = (max_response_length - buffer_length - lengths_GN.double()) / buffer_length
    return left_GN.clamp(max=0.0) * penalty_factor
