"""Importance ratios: safe log-ratios, and how far the trainer's probabilities are from the rollout engine's.

Shapes: T packed tokens (1-D, any number of trajectories one after another).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Nats. A ratio lies within [e^-20, e^20]; the clamp is the one in the authors' released code."""


def clamped_log_ratio(log_ratio_T: Tensor) -> Tensor:
    """Log-ratio [T] in nats limited to +-20: infinities become finite, NaN stays NaN, the gradient outside is 0."""
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class MismatchSums:
    """Train/rollout mismatch, detached 0-d float64: add over micro-batches and ranks, maximise `abs_prob_diff_max`."""

    num_tokens: Tensor
    """Tokens with both log-probs present (not NaN)."""
    num_dropped: Tensor
    abs_prob_diff_sum: Tensor
    """Sum of |p_current - p_behaviour|; over `num_tokens` it is verl's training/rollout_probs_diff_mean."""
    abs_prob_diff_max: Tensor
    """verl's training/rollout_probs_diff_max; 0 without tokens."""
    k3_kl_sum: Tensor
    """Sum of r - 1 - log r, the k3 estimate of KL(behaviour || current) in nats (joschu.net/blog/kl-approx.html)."""
    mult_prob_error_sum: Tensor
    """Sum of exp |log p_current - log p_behaviour|, NeMo-RL's token_mult_prob_error (loss_functions.py)."""
    importance_ratio_sum: Tensor
    """Sum of r = p_current / p_behaviour, NeMo-RL's sampling_importance_ratio; 1 on average over the behaviour."""


@torch.no_grad()
def mismatch_sums(current_log_probs_T: Tensor, behaviour_log_probs_T: Tensor) -> MismatchSums:
    """Compare the log-probs [T] of the same tokens under the same weights in trainer and rollout engine.

    verl takes the same difference (`verl/utils/debug/metrics.py`). A token with a NaN log-prob is left out and counted.
    """
    current_T, behaviour_T = current_log_probs_T.double(), behaviour_log_probs_T.double()
    dropped_T = (current_T - behaviour_T).isnan()
    log_ratio_T = clamped_log_ratio((current_T - behaviour_T).masked_fill(dropped_T, 0.0))
    prob_diff_T = (current_T.exp() - behaviour_T.exp()).abs().masked_fill(dropped_T, 0.0)
    # A leading zero gives the maximum of an empty micro-batch without a branch.
    prob_diff_max = torch.cat((prob_diff_T.new_zeros(1), prob_diff_T)).max()
    return MismatchSums(
        num_tokens=(~dropped_T).sum(dtype=torch.float64),
        num_dropped=dropped_T.sum(dtype=torch.float64),
        abs_prob_diff_sum=prob_diff_T.sum(),
        abs_prob_diff_max=prob_diff_max,
        k3_kl_sum=(log_ratio_T.expm1() - log_ratio_T).sum(),
        mult_prob_error_sum=log_ratio_T.abs().exp().masked_fill(dropped_T, 0.0).sum(),
        importance_ratio_sum=log_ratio_T.exp().masked_fill(dropped_T, 0.0).sum(),
    )
