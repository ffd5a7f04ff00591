"""The Entropy-Clip Rule (arXiv 2510.18927, Section 3): how an update with clip bounds changes a policy's entropy.

One state, a softmax policy p with a free logit for each of V actions, advantages A with E_p[A] = 0, ratios r to the
behaviour policy. A token is live (X = 1) if the clip leaves it a gradient: A > 0 and r < high, or A < 0 and r > low.
The clipped objective's gradient by the logits is p (A X + C), with C = -E_p[A X], the sum of p A over tokens that are
not live. A small step d of the logits changes the entropy by -Cov_p(log p, d), so that, per unit of the learning rate,

    `gradient` (Proposition 1)    dH = -Cov_p(log p, p (A X + C))    for a plain gradient step
    `printed` (Eq. 6)             dH = -Cov_p(log p, A X + C)        for a step of A X + C, as natural gradients are

with an error that shrinks with the rate. Proposition 2 of the paper drops the factor p on the way to Eq. 6, without
which the rule is wrong for a plain gradient step: in about 5 times the size, and sometimes in the sign.

Shapes: V actions of one state; N sampled tokens, each of a state of its own.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio

Form = Literal["gradient", "printed"]


def live(ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    """X of Eq. 7, as booleans."""
    return ((advantages > 0) & (ratio < high)) | ((advantages < 0) & (ratio > low))


def logit_step(log_probs_V: Tensor, advantages_V: Tensor, live_V: Tensor, form: Form) -> Tensor:
    """The step [V] of one state's logits per unit of the learning rate."""
    probs_V, gain_V = log_probs_V.exp(), advantages_V * live_V
    step_V = gain_V - (probs_V * gain_V).sum()
    return probs_V * step_V if form == "gradient" else step_V


def entropy_change(log_probs_V: Tensor, step_V: Tensor) -> Tensor:
    """First-order change of the entropy, -Cov_p(log p, step), in nats, 0-d."""
    probs_V = log_probs_V.exp()
    return -(probs_V * (log_probs_V - (probs_V * log_probs_V).sum()) * step_V).sum()


@torch.no_grad()
def sampled_entropy_change(
    log_probs_N: Tensor,
    behaviour_log_probs_N: Tensor,
    entropy_N: Tensor,
    advantages_N: Tensor,
    low: Tensor,
    high: Tensor,
    form: Form,
) -> Tensor:
    """Each sampled token's estimate of its state's entropy change per unit of the learning rate, float64 [N].

    -r (log p + H) A X, times p for `gradient`, with the state's entropy H. The ratio r makes up for sampling from the
    behaviour policy, so the expectation over that is -Cov_p(log p, A X) or -Cov_p(log p, p A X). The first is the
    printed rule, as C has no covariance; the second is Proposition 1 without C Cov_p(log p, p), which a single token
    says nothing about. And a network's states share their weights, and Adam is no plain gradient: expect the sign and
    the course of the entropy from this, not its size. A token without a finite estimate has 0.
    """
    log_probs_N = log_probs_N.double()
    ratio_N = clamped_log_ratio(log_probs_N - behaviour_log_probs_N).exp()
    estimate_N = -ratio_N * (log_probs_N + entropy_N) * advantages_N * live(ratio_N, advantages_N, low, high)
    if form == "gradient":
        estimate_N = estimate_N * log_probs_N.exp()
    return estimate_N.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
