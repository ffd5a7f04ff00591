"""The clipped policy loss and the supervised loss of one packed micro-batch.

Both are plain weighted sums over tokens. The weights carry the whole minibatch's denominators, so the losses (and the
gradients) of its micro-batches and ranks add up to the minibatch's, however it is split. Gradients are to be added over
ranks, not averaged.

Shapes: T packed tokens, B trajectories of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@dataclass(frozen=True)
class PolicyLossSums:
    """Sums over a micro-batch's tokens, detached 0-d float64: add them over micro-batches and ranks, then divide."""

    num_tokens: Tensor
    """Tokens that count: weight not zero, not dropped."""
    num_dropped: Tensor
    """Tokens with a NaN log-ratio, or an advantage or weight that is not finite."""
    num_positive: Tensor
    """Tokens with A > 0."""
    num_negative: Tensor
    num_clipped_high: Tensor
    """A > 0 and r > high; with `num_clipped_low`, over `num_tokens`, it is verl's actor/pg_clipfrac."""
    num_clipped_low: Tensor
    """A < 0 and r < low."""
    k1_kl: Tensor
    """Sum of -log r in nats, the k1 estimate of KL(behaviour || current); its mean is verl's actor/ppo_kl."""
    k3_kl: Tensor
    """Sum of r - 1 - log r, the k3 estimate of the same (joschu.net/blog/kl-approx.html), never negative."""
    positive_sum: Tensor
    """P, the sum over A > 0 of the clipped surrogate, unweighted (arXiv 2510.18927, Eq. 8)."""
    negative_sum: Tensor
    """N, its absolute sum over A < 0."""


def token_weights(mode: LossAggMode, response_lengths_B: Tensor, *, num_trajectories: int, num_tokens: int) -> Tensor:
    """Weight of each trajectory's tokens, float64 [B], with which the minibatch's token losses add up to `mode`.

    `num_trajectories` and `num_tokens` (response tokens) count the whole minibatch, over all micro-batches and ranks.
    The modes are verl's `loss_agg_mode` (`agg_loss` in `core_algos.py`).
    """
    lengths_B = response_lengths_B.double()
    match mode:
        case "token-mean":
            return torch.full_like(lengths_B, 1 / num_tokens)
        case "seq-mean-token-sum":
            return torch.full_like(lengths_B, 1 / num_trajectories)
        case "seq-mean-token-mean":
            return 1 / (num_trajectories * lengths_B)


def policy_loss(
    current_log_probs_T: Tensor,
    behaviour_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    low: Tensor,
    high: Tensor,
) -> tuple[Tensor, PolicyLossSums]:
    """Negative clipped surrogate -sum w min(r A, clip(r, low, high) A) as a 0-d tensor, and its statistics.

    The objective of arXiv 2510.18927, r = exp(current - behaviour log-prob, nats); `low` and `high` are 0-d. A token of
    weight 0 does not exist. Dropped tokens are left out by selection, before the exponential, so that the gradient
    stays finite; beyond +-20 nats a log-ratio is clamped and has no gradient.
    """
    log_ratio_T = current_log_probs_T - behaviour_log_probs_T
    present_T = weights_T != 0
    usable_T = ~log_ratio_T.isnan() & advantages_T.isfinite() & weights_T.isfinite()
    counts_T = present_T & usable_T
    excluded_T = ~counts_T
    log_ratio_T = clamped_log_ratio(log_ratio_T.masked_fill(excluded_T, 0.0))
    advantages_T = advantages_T.masked_fill(excluded_T, 0.0)
    ratio_T = log_ratio_T.exp()
    surrogate_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    loss = -(weights_T.masked_fill(excluded_T, 0.0) * surrogate_T).sum()

    log_ratio_T, ratio_T = log_ratio_T.detach().double(), ratio_T.detach()
    positive_T, negative_T = advantages_T > 0, advantages_T < 0
    sums = PolicyLossSums(
        num_tokens=_count(counts_T),
        num_dropped=_count(present_T & ~usable_T),
        num_positive=_count(positive_T),
        num_negative=_count(negative_T),
        num_clipped_high=_count(positive_T & (ratio_T > high)),
        num_clipped_low=_count(negative_T & (ratio_T < low)),
        k1_kl=-log_ratio_T.sum(),
        k3_kl=(log_ratio_T.expm1() - log_ratio_T).sum(),
        positive_sum=surrogate_T.detach().double().clamp(min=0).sum(),
        negative_sum=surrogate_T.detach().double().clamp(max=0).sum().neg(),
    )
    return loss, sums


def supervised_loss(current_log_probs_T: Tensor, weights_T: Tensor) -> Tensor:
    """Weighted negative log-likelihood -sum w log p, 0-d, in nats."""
    return -(weights_T * current_log_probs_T).sum()


def _count(selected_T: Tensor) -> Tensor:
    return selected_T.sum(dtype=torch.float64)
