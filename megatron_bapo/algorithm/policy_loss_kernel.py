"""Triton kernel for the weighted sum of the objective over tokens and its gradient with respect to the log-probs.

One float32 kernel computes what takes `policy_loss` and `OBJECTIVES` about twenty torch operators. Shapes: T packed
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_bapo.algorithm.importance import MAX_LOG_RATIO
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.objectives import OBJECTIVES, clipped_weight, soft_gated
from megatron_bapo.config.algorithm import AlgorithmConfig, Objective

BLOCK = 1024


def fused_objective_loss(
    log_probs_T: Tensor,
    tokens: LossTokens,
    low: Tensor,
    high: Tensor,
    objective: Objective,
    settings: AlgorithmConfig,
) -> Tensor:
    """Return -sum w c J, 0-d float32, differentiable once with respect to the log-probs."""
    result: Any = _ObjectiveLoss.apply(log_probs_T, tokens, low, high, objective, settings)
    return result


class _ObjectiveLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        log_probs_T: Tensor,
        tokens: LossTokens,
        low: Tensor,
        high: Tensor,
        objective: Objective,
        settings: AlgorithmConfig,
    ) -> Tensor:
        num_tokens, dual = len(log_probs_T), settings.clip_ratio_c
        loss_T, grad_T = torch.empty(2, num_tokens, device=log_probs_T.device)
        correction_T, sequence_T = tokens.correction_T, tokens.sequence_log_ratio_T
        if num_tokens:
            launch: Any = _objective_loss[(triton.cdiv(num_tokens, BLOCK),)]
            launch(
                *(log_probs_T, tokens.behaviour_log_probs_T, tokens.advantages_T, tokens.weights_T),
                log_probs_T if correction_T is None else correction_T,
                log_probs_T if sequence_T is None else sequence_T,
                *(low, high, 0.0 if dual is None else dual, settings.tau_pos, settings.tau_neg),
                *(loss_T, grad_T, num_tokens),
                MAX_LOG_RATIO=MAX_LOG_RATIO,
                CORRECTED=correction_T is not None,
                OF_SEQUENCES=sequence_T is not None,
                DUAL=dual is not None,
                WEIGHTED=OBJECTIVES[objective] is clipped_weight,
                SOFT=OBJECTIVES[objective] is soft_gated,
                BLOCK=BLOCK,
            )
        ctx.save_for_backward(grad_T)
        return loss_T.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_T,) = ctx.saved_tensors
        return grads[0] * grad_T, None, None, None, None, None


@triton.jit
def _objective_loss(
    log_probs_T,
    behaviour_T,
    advantages_T,
    weights_T,
    correction_T,
    sequence_log_ratio_T,
    low_0,
    high_0,
    dual,
    tau_pos,
    tau_neg,
    loss_T,
    grad_T,
    num_tokens,
    MAX_LOG_RATIO: tl.constexpr,
    CORRECTED: tl.constexpr,
    OF_SEQUENCES: tl.constexpr,
    DUAL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SOFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    log_prob = tl.load(log_probs_T + token, mask=inside, other=0.0).to(tl.float32)
    log_ratio = log_prob - tl.load(behaviour_T + token, mask=inside, other=0.0).to(tl.float32)
    advantage = tl.load(advantages_T + token, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights_T + token, mask=inside, other=0.0).to(tl.float32)
    low = tl.load(low_0).to(tl.float32)
    high = tl.load(high_0).to(tl.float32)

    # Comparisons with NaN are false, so a NaN excludes its token.
    usable = (weight != 0.0) & (log_ratio == log_ratio)
    usable &= (tl.abs(advantage) < float("inf")) & (tl.abs(weight) < float("inf"))
    if CORRECTED:
        correction = tl.load(correction_T + token, mask=inside, other=0.0).to(tl.float32)
        usable &= (correction != 0.0) & (tl.abs(correction) < float("inf"))
        weight *= correction
    log_ratio = tl.where(usable, log_ratio, 0.0)
    advantage = tl.where(usable, advantage, 0.0)
    # At the limits of the clamp torch passes the gradient through.
    unclamped = tl.abs(log_ratio) <= MAX_LOG_RATIO
    ratio = tl.exp(tl.minimum(tl.maximum(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    if OF_SEQUENCES:
        ratio = tl.exp(tl.where(usable, tl.load(sequence_log_ratio_T + token, mask=inside, other=0.0), 0.0))
    clipped = tl.minimum(tl.maximum(ratio, low), high)
    if WEIGHTED:
        finite = usable & (tl.abs(log_prob) < float("inf"))
        slope = tl.where(finite, clipped * advantage, 0.0)
        value = slope * tl.where(finite, log_prob, 0.0)
    elif SOFT:
        value, slope = _soft_gated(ratio, advantage, tau_pos, tau_neg)  # pyright: ignore[reportGeneralTypeIssues]
        slope = tl.where(unclamped, slope, 0.0)
    else:
        value, slope = _clipped_surrogate(ratio, clipped, advantage, dual, DUAL)  # pyright: ignore[reportGeneralTypeIssues]
        slope = tl.where(unclamped, slope, 0.0)
    tl.store(loss_T + token, tl.where(usable, -weight * value, 0.0), mask=inside)
    tl.store(grad_T + token, tl.where(usable, -weight * slope, 0.0), mask=inside)


@triton.jit
def _soft_gated(ratio, advantage, tau_pos, tau_neg):
    """Return `soft_gated` and its derivative by the log-ratio."""
    tau = tl.where(advantage > 0.0, tau_pos, tau_neg)
    gate = tl.sigmoid(tau * (ratio - 1.0))
    return 4.0 / tau * gate * advantage, 4.0 * gate * (1.0 - gate) * ratio * advantage


@triton.jit
def _clipped_surrogate(ratio, clipped, advantage, dual, DUAL: tl.constexpr):
    """Return `clipped_surrogate` and its derivative by the log-ratio."""
    value = tl.minimum(ratio * advantage, clipped * advantage)
    slope = tl.where(ratio * advantage <= clipped * advantage, ratio * advantage, 0.0)
    if DUAL:
        limit = tl.where(advantage < 0.0, dual * advantage, -float("inf"))
        # Torch halves the gradient where both are equal.
        slope = tl.where(value > limit, slope, tl.where(value == limit, 0.5 * slope, 0.0))
        value = tl.maximum(value, limit)
    return value, slope
