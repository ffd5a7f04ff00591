"""Clamped log-ratios, and statistics of the mismatch between the trainer's and the rollout engine's probabilities.

Shapes: T packed tokens (1-D, any number of concatenated trajectories).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_LOG_RATIO: Final = 20.0
"""Limit of |log-ratio| in nats, so that ratios lie within [e^-20, e^20], as in the authors' released code."""


def clamped_log_ratio(log_ratio_T: Tensor) -> Tensor:
    """Clamp log-ratios [T] in nats to +-20: infinities become finite, NaN stays NaN, the gradient outside is 0."""
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class MismatchSums:
    """Sums of the train/rollout mismatch, detached 0-d float64.

    Reduce over micro-batches and ranks by sum, and `abs_prob_diff_max` by maximum.
    """

    num_tokens: Tensor
    """Number of tokens where both log-probs are present (not NaN)."""
    num_dropped: Tensor
    """Number of tokens where a log-prob is NaN."""
    abs_prob_diff_sum: Tensor
    """Sum of |p_current - p_behaviour|; divided by `num_tokens`, verl's training/rollout_probs_diff_mean."""
    abs_prob_diff_max: Tensor
    """verl's training/rollout_probs_diff_max; 0 without tokens."""
    k3_kl_sum: Tensor
    """Sum of r - 1 - log r, the k3 estimate of KL(behaviour || current) in nats (joschu.net/blog/kl-approx.html)."""
    mult_prob_error_sum: Tensor
    """Sum of exp |log p_current - log p_behaviour|, NeMo-RL's token_mult_prob_error (loss_functions.py)."""
    importance_ratio_sum: Tensor
    """Sum of r = p_current / p_behaviour, NeMo-RL's sampling_importance_ratio; r is 1 in expectation."""


@torch.no_grad()
def mismatch_sums(current_log_probs_T: Tensor, behaviour_log_probs_T: Tensor) -> MismatchSums:
    """Compare the log-probs [T] of the same tokens under the same weights in the trainer and the rollout engine.

    verl computes the same difference (`verl/utils/debug/metrics.py`). Tokens with a NaN log-prob are dropped and
    counted.
    """
    current_T, behaviour_T = current_log_probs_T.double(), behaviour_log_probs_T.double()
    dropped_T = (current_T - behaviour_T).isnan()
    log_ratio_T = clamped_log_ratio((current_T - behaviour_T).masked_fill(dropped_T, 0.0))
    prob_diff_T = (current_T.exp() - behaviour_T.exp()).abs().masked_fill(dropped_T, 0.0)
    # The leading zero is the maximum of an empty micro-batch and avoids a branch.
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
