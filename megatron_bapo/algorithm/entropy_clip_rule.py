"""The Entropy-Clip Rule (arXiv 2510.18927, Section 3): how an update with clip bounds changes a policy's entropy.

The rule considers one state: a softmax policy p with a free logit for each of V actions, advantages A with E_p[A] = 0,
and ratios r to the behaviour policy. The clip leaves a token its gradient (X = 1) if A > 0 and r < high, or A < 0 and
r > low; with the dual clip (`clip_ratio_c`), r must also be below c where A < 0. The gradient of the clipped objective
with respect to the logits is p (A X + C), where C = -E_p[A X] is the sum of p A over the tokens without a gradient. A
small step d of the logits changes the entropy by -Cov_p(log p, d). Per unit of the learning rate this gives

    `gradient` (Proposition 1)    dH = -Cov_p(log p, p (A X + C))    for a plain gradient step
    `printed` (Eq. 6)             dH = -Cov_p(log p, A X + C)        for a step of A X + C, as in natural gradients

with an error that shrinks with the rate. Proposition 2 of the paper drops the factor p on the way to Eq. 6. Without
that factor the rule is wrong for a plain gradient step: about 5 times too large, and sometimes of the wrong sign.

Shapes: N sampled tokens, each from a different state.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio

Form = Literal["gradient", "printed"]


def has_gradient(
    ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float, clip_ratio_c: float = float("inf")
) -> Tensor:
    """Return X of Eq. 7 as booleans: whether the clip leaves each token its gradient."""
    return ((advantages > 0) & (ratio < high)) | ((advantages < 0) & (ratio > low) & (ratio < clip_ratio_c))


@torch.no_grad()
def sampled_entropy_change(
    log_probs_N: Tensor,
    behaviour_log_probs_N: Tensor,
    entropy_N: Tensor,
    advantages_N: Tensor,
    low: Tensor,
    high: Tensor,
    form: Form,
    clip_ratio_c: float = float("inf"),
) -> Tensor:
    """Estimate from each sampled token the entropy change of its state per unit of the learning rate, float64 [N].

    The estimate is -r (log p + H) A X, times p for `gradient`, where H is the entropy of the state. The ratio r
    corrects for sampling from the behaviour policy, so the expectation over that policy is -Cov_p(log p, A X) or
    -Cov_p(log p, p A X). The first is the printed rule, because the constant C has no covariance. The second is
    Proposition 1 without the term C Cov_p(log p, p), which cannot be estimated from a single token. The states of a
    network share its weights, and Adam is not plain gradient descent, so the estimates predict the sign and the trend
    of the entropy, not its magnitude. The estimate of a token is 0 where it is not finite.
    """
    log_probs_N = log_probs_N.double()
    ratio_N = clamped_log_ratio(log_probs_N - behaviour_log_probs_N).exp()
    gain_N = advantages_N * has_gradient(ratio_N, advantages_N, low, high, clip_ratio_c)
    estimate_N = -ratio_N * (log_probs_N + entropy_N) * gain_N
    if form == "gradient":
        estimate_N = estimate_N * log_probs_N.exp()
    return estimate_N.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
