"""Policy objectives: functions of the token ratios that are maximized.

All have the signature (log-ratio [T], current log-probs [T], advantages [T], low, high, settings) -> value [T]. The
log-ratio is current minus behaviour log-prob in nats, of the token or, for GSPO, of its sequence. Gradients flow
through the log-ratio and the log-probs. `low` and `high` are 0-d clip bounds, either fixed or found by BAPO for the
minibatch.

On-policy distillation is an objective whose advantages are the log-ratios of the teacher to the policy.

Shapes: T packed tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.config.algorithm import AlgorithmConfig, Objective

TokenObjective = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AlgorithmConfig], Tensor]


def clipped_surrogate(
    log_ratio_T: Tensor, _: Tensor, advantages_T: Tensor, low: Tensor, high: Tensor, settings: AlgorithmConfig
) -> Tensor:
    """Return min(r A, clip(r, low, high) A), which for A < 0 is at least clip_ratio_c A if that is given.

    With the bounds 1 -+ clip_ratio this is the objective of PPO (arXiv 1707.06347, Eq. 7) and GRPO; with a larger upper
    distance, DAPO's clip-higher (arXiv 2503.14476, Eq. 10); with adaptive bounds, BAPO (arXiv 2510.18927); and with
    `clip_ratio_c`, dual-clip PPO (arXiv 1912.09729, Eq. 8), which removes the gradient of A < 0 beyond r = c.
    """
    ratio_T = log_ratio_T.exp()
    surrogate_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(low, high) * advantages_T)
    if settings.clip_ratio_c is None:
        return surrogate_T
    return torch.where(advantages_T < 0, surrogate_T.maximum(settings.clip_ratio_c * advantages_T), surrogate_T)


def clipped_weight(
    log_ratio_T: Tensor, log_probs_T: Tensor, advantages_T: Tensor, low: Tensor, high: Tensor, _: AlgorithmConfig
) -> Tensor:
    """Return CISPO's sg[clip(r, low, high)] A log p, where every token keeps its gradient (arXiv 2506.13585, Eq. 4-5).

    The paper has no lower bound, which is clip_ratio_low=1.
    """
    return log_ratio_T.detach().exp().clamp(low, high) * advantages_T * log_probs_T


def soft_gated(
    log_ratio_T: Tensor, _: Tensor, advantages_T: Tensor, low: Tensor, high: Tensor, settings: AlgorithmConfig
) -> Tensor:
    """Return SAPO's 4/tau sigmoid(tau (r - 1)) A, with tau by the sign of A (arXiv 2511.20347), which has no bounds.

    The gradient of a token is that of the unclipped r A where r = 1, and fades on both sides of it.
    """
    tau_T = torch.full_like(advantages_T, settings.tau_neg).masked_fill(advantages_T > 0, settings.tau_pos)
    return 4 / tau_T * torch.sigmoid(tau_T * (log_ratio_T.exp() - 1)) * advantages_T


OBJECTIVES: Final[dict[Objective, TokenObjective]] = {
    "bapo": clipped_surrogate,
    "ppo": clipped_surrogate,
    "gspo": clipped_surrogate,
    "cispo": clipped_weight,
    "sapo": soft_gated,
    "distill": clipped_weight,
}


@torch.no_grad()
def toward_teacher(log_probs_T: Tensor, tokens: LossTokens) -> LossTokens:
    """Return the tokens with the advantages of on-policy distillation, log p_teacher - log p, clamped to +-20.

    The advantage is the negative reverse KL divergence of the token's distribution, estimated from the sampled token
    (thinkingmachines.ai/blog/on-policy-distillation). As p is the current policy, `clipped_weight` with these
    advantages has in expectation the gradient of -KL(p || p_teacher), also for tokens of older policies as long as
    their ratios are not truncated. A token without a log-prob of the teacher gets NaN, which excludes it.
    """
    assert tokens.teacher_log_probs_T is not None, "algorithm.distillation needs a teacher"
    advantages_T = clamped_log_ratio(tokens.teacher_log_probs_T - log_probs_T)
    return replace(tokens, advantages_T=advantages_T, sequence_log_ratio_T=None)


@torch.no_grad()
def sequence_log_ratios(
    log_ratio_T: Tensor,
    usable_T: Tensor,
    sequence_index_T: Tensor,
    num_sequences: int,
    reduce: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Return for each token the mean log-ratio of its sequence [T]: GSPO's log s (arXiv 2507.18071, Eq. 7).

    The mean is taken over usable tokens, whose log-ratios are clamped to +-20. `sequence_index_T` lies below
    `num_sequences`. `reduce` sums one tensor in place over the ranks that share the sequences.
    """
    sums_2B = log_ratio_T.new_zeros(2, num_sequences)
    sums_2B[0].index_add_(0, sequence_index_T, clamped_log_ratio(log_ratio_T).masked_fill(~usable_T, 0.0))
    sums_2B[1].index_add_(0, sequence_index_T, usable_T.to(sums_2B.dtype))
    if reduce is not None:
        reduce(sums_2B)
    sums_B, counts_B = sums_2B
    return (sums_B / counts_B.clamp(min=1.0))[sequence_index_T]


def with_token_gradient(sequence_log_ratio_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """Return GSPO-token's log-ratio, sg[log s] + log p - sg[log p] (arXiv 2507.18071, Eq. 14).

    Its value is the log-ratio of the sequence. If the tokens of a sequence share one advantage and have the weight
    1 / length, their gradients add up to the gradient of the sequence objective.
    """
    return sequence_log_ratio_T + (log_ratio_T - log_ratio_T.detach())
