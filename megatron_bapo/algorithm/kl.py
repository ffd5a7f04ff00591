"""Estimators of KL(current || reference) from sampled tokens (joschu.net/blog/kl-approx.html).

Shapes: T tokens.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio
from megatron_bapo.config.algorithm import KlType

MAX_K3: Final = 10.0
"""Largest k3 estimate in nats, as in verl's low_var_kl. Without it the gradient of one token grows as e^-x."""


def kl_estimate(kind: KlType, log_probs_T: Tensor, reference_log_probs_T: Tensor) -> Tensor:
    """Return one KL estimate per token [T] in nats, with x = log p - log p_reference clamped to +-20.

    `k1` is x, `k2` is x^2 / 2, `k3` is min(exp(-x) - 1 + x, 10): verl's kl, mse and low_var_kl (`kl_penalty_forward` in
    `verl/trainer/ppo/core_algos.py`), where verl clamps x for low_var_kl only. A clamped token has no gradient; k3
    reaches its limit at x = -2.6. As a reward, k1 is unbiased. As a loss on tokens sampled from the current policy, k1
    has an expected gradient of 0, k2 has the gradient of KL(current || reference), and k3 that of KL(reference ||
    current).
    """
    x_T = clamped_log_ratio(log_probs_T - reference_log_probs_T)
    match kind:
        case "k1":
            return x_T
        case "k2":
            return x_T.square() / 2
        case "k3":
            return ((-x_T).expm1() + x_T).clamp(max=MAX_K3)


def of_current_policy(kind: KlType, kl_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """Weight KL estimates [T] with the ratio of the current policy to the one that sampled the tokens.

    The expectation over sampled tokens is then the KL of the current policy, and that of the gradient its gradient. For
    this the ratio of k1 and k3 has a gradient, as in DeepSeek-V3.2 (arXiv 2512.02556, Section 3.1) for k3, and that of
    k2 has none, because k2 has the right gradient under the current policy. Where k3 is limited there is a bias.
    """
    ratio_T = clamped_log_ratio(log_ratio_T).exp()
    return kl_T * (ratio_T.detach() if kind == "k2" else ratio_T)
