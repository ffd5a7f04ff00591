"""Estimates of KL(current || reference) from sampled tokens (joschu.net/blog/kl-approx.html).

Shapes: T tokens.
"""

from __future__ import annotations

from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio
from megatron_bapo.config.algorithm import KlType


def kl_estimate(kind: KlType, log_probs_T: Tensor, reference_log_probs_T: Tensor) -> Tensor:
    """One estimate a token [T] in nats, with x = log p - log p_reference limited to +-20.

    `k1` is x, `k2` is x^2 / 2, `k3` is exp(-x) - 1 + x: verl's kl, mse and low_var_kl (`kl_penalty` in
    `core_algos.py`). As a reward k1 is unbiased. As a loss on tokens of the current policy k1 has a mean gradient of 0,
    k2 has the KL's own, and k3 that of the reverse KL.
    """
    x_T = clamped_log_ratio(log_probs_T - reference_log_probs_T)
    match kind:
        case "k1":
            return x_T
        case "k2":
            return x_T.square() / 2
        case "k3":
            return (-x_T).expm1() + x_T
