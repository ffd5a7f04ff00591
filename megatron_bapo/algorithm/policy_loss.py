"""Policy loss and supervised loss of one packed micro-batch.

Both are weighted sums over tokens. The weights include the loss normalization of the whole minibatch (by its global
token count, for example), so the losses and gradients of micro-batches and ranks add up to those of the minibatch,
however it is split. Gradients must be summed over ranks, not averaged.

Shapes: T packed tokens, B trajectories of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bapo.algorithm.importance import clamped_log_ratio
from megatron_bapo.algorithm.kl import kl_estimate, of_current_policy
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.objectives import (
    OBJECTIVES,
    clipped_weight,
    soft_gated,
    toward_teacher,
    with_token_gradient,
)
from megatron_bapo.algorithm.user_functions import user_objective
from megatron_bapo.config.algorithm import AlgorithmConfig, LossAggMode, Objective


@dataclass(frozen=True)
class PolicyLossSums:
    """Sums over the tokens of a micro-batch, detached 0-d float64: sum over micro-batches and ranks, then divide."""

    num_tokens: Tensor
    """Number of usable tokens: weight not zero, not dropped."""
    num_dropped: Tensor
    """Number of tokens with a NaN log-ratio, or an advantage or weight that is not finite."""
    num_positive: Tensor
    """Number of tokens with A > 0."""
    num_negative: Tensor
    """Number of tokens with A < 0."""
    num_clipped_high: Tensor
    """Number of tokens that the upper bound clips (`clipped_tokens`); verl's actor/pg_clipfrac is (high + low) /
    `num_tokens`."""
    num_clipped_low: Tensor
    """Number of tokens that the lower bound clips."""
    num_clipped_dual: Tensor
    """Number of tokens with A < 0 and r > clip_ratio_c."""
    k1_kl: Tensor
    """Sum of -log r in nats, the k1 estimate of KL(behaviour || current); its mean is verl's actor/ppo_kl."""
    k3_kl: Tensor
    """Sum of r - 1 - log r, the k3 estimate of that KL (joschu.net/blog/kl-approx.html), never negative."""
    kl_loss: Tensor
    """Weighted sum of the KL estimates to the reference model (verl's actor/kl_loss); 0 without one.

    A token whose log-prob under the reference model is NaN has no estimate.
    """
    num_kl_dropped: Tensor
    """Number of usable tokens without such an estimate; 0 without a reference model."""
    teacher_kl: Tensor
    """Sum of log p - log p_teacher in nats, the k1 estimate of KL(current || teacher); 0 without a teacher."""
    num_teacher_dropped: Tensor
    """Number of usable tokens without such an estimate, because a log-prob is NaN; 0 without a teacher."""
    positive_sum: Tensor
    """P, the sum of the clipped surrogate over A > 0 (arXiv 2510.18927, Eq. 8).

    With `cispo` and `distill` the sum is that of clip(r) A, with `sapo` that of its objective. Tokens have the weights
    of the search for BAPO's bounds: those of rollout correction, times those of the loss with
    `clip_bounds.weights=loss`.
    """
    negative_sum: Tensor
    """N, the absolute sum of the same over A < 0."""


def token_weights(
    mode: LossAggMode,
    response_lengths_B: Tensor,
    *,
    num_trajectories: int,
    num_tokens: int,
    max_response_length: int,
) -> Tensor:
    """Return the loss weight of the tokens of each trajectory, float64 [B], that implements `mode` as a weighted sum.

    Lengths and `num_tokens` count response tokens that are not rejected. `num_trajectories` and `num_tokens` are global
    counts of the minibatch, over all micro-batches and ranks. The modes are those of verl's `loss_agg_mode`
    (`agg_loss` in `core_algos.py`); `seq-mean-token-sum-norm` is the constant divisor of Dr. GRPO (arXiv 2503.20783,
    appendix A).
    """
    lengths_B = response_lengths_B.double()
    match mode:
        case "token-mean":
            return torch.full_like(lengths_B, 1 / num_tokens)
        case "seq-mean-token-sum":
            return torch.full_like(lengths_B, 1 / num_trajectories)
        case "seq-mean-token-mean":
            return 1 / (num_trajectories * lengths_B.clamp(min=1.0))
        case "seq-mean-token-sum-norm":
            return torch.full_like(lengths_B, 1 / (num_trajectories * max_response_length))


def policy_loss(
    log_probs_T: Tensor,
    entropy_T: Tensor,
    tokens: LossTokens,
    low: Tensor,
    high: Tensor,
    settings: AlgorithmConfig,
    *,
    fused: bool = False,
) -> Tensor:
    """Return the loss -sum w c J - coef sum w c D + kl_loss_coef sum w KL - entropy_coeff sum w H, 0-d.

    J is the objective, D that of distillation (`toward_teacher`) and c the rollout correction; with `distill` there is
    no J. `log_probs_T` and `entropy_T` are those of the current policy, in nats; `low` and `high` are 0-d. Dropped
    tokens are excluded by selection before the exponential, so the gradient stays finite. A log-ratio beyond +-20 nats
    is clamped and has no gradient. With `fused`, a Triton kernel computes the objectives, but not one of the user's.
    """
    if fused:
        from megatron_bapo.algorithm.policy_loss_kernel import fused_objective_loss as loss_of  # may not be installed
    else:
        loss_of = _objective_loss
    distillation, loss = settings.distillation, log_probs_T.new_zeros(())
    if settings.objective == "function":
        loss = _objective_loss(log_probs_T, tokens, low, high, settings.objective, settings)
    elif settings.objective != "distill":
        loss = loss_of(log_probs_T, tokens, low, high, settings.objective, settings)
    if distillation is not None:
        ends = log_probs_T.new_zeros(()), log_probs_T.new_full((), distillation.max_ratio)
        taught = toward_teacher(log_probs_T, tokens)
        loss = loss + distillation.coef * loss_of(log_probs_T, taught, *ends, "distill", settings)
    if settings.kl_loss_coef or settings.entropy_coeff:
        excluded_T = ~usable_tokens(log_probs_T - tokens.behaviour_log_probs_T, tokens)
        weights_T = tokens.weights_T.masked_fill(excluded_T, 0.0)
        if settings.kl_loss_coef:
            loss = loss + settings.kl_loss_coef * _kl_loss(log_probs_T, tokens, weights_T, settings)
        if settings.entropy_coeff:
            loss = loss - settings.entropy_coeff * (weights_T * entropy_T.masked_fill(excluded_T, 0.0)).sum()
    return loss


def _objective_loss(
    log_probs_T: Tensor,
    tokens: LossTokens,
    low: Tensor,
    high: Tensor,
    objective: Objective,
    settings: AlgorithmConfig,
) -> Tensor:
    log_ratio_T = log_probs_T - tokens.behaviour_log_probs_T
    excluded_T = ~usable_tokens(log_ratio_T, tokens)
    if objective == "function" and tokens.masked_T is not None:  # in others the advantage is a factor
        excluded_T = excluded_T | tokens.masked_T
    value_of = user_objective(settings.function or "") if objective == "function" else OBJECTIVES[objective]
    value_T = value_of(
        _objective_log_ratio(log_ratio_T.masked_fill(excluded_T, 0.0), tokens),
        log_probs_T.masked_fill(excluded_T | log_probs_T.isinf(), 0.0),
        tokens.advantages_T.masked_fill(excluded_T, 0.0),
        low,
        high,
        settings,
    )
    value_T = value_T.masked_fill(excluded_T, 0.0)  # the user's objective may be infinite there
    if tokens.correction_T is not None:
        value_T = value_T * tokens.correction_T.masked_fill(excluded_T, 0.0)
    return -(tokens.weights_T.masked_fill(excluded_T, 0.0) * value_T).sum()


@dataclass(frozen=True)
class ClippedTokens:
    """What the loss does with each token, detached [T]. GSPO clips by the ratio of the sequence."""

    usable_T: Tensor
    """Whether the token contributes (`usable_tokens`)."""
    ratio_T: Tensor
    """Ratio r that is clipped; 1 where the token is not usable."""
    high_T: Tensor
    """Whether the upper bound clips it: r > high, and A > 0 unless the objective clips weights (`clipped_weight`)."""
    low_T: Tensor
    """Whether the lower bound clips it: r < low, and A < 0 unless the objective clips weights."""
    dual_T: Tensor
    """Whether the dual clip removes its gradient: A < 0 and r > clip_ratio_c."""


@torch.no_grad()
def clipped_tokens(
    log_probs_T: Tensor, tokens: LossTokens, low: Tensor, high: Tensor, settings: AlgorithmConfig
) -> ClippedTokens:
    """Return which tokens `policy_loss` clips under the same arguments."""
    tokens = _advantaged(log_probs_T, tokens, settings)
    log_ratio_T = log_probs_T - tokens.behaviour_log_probs_T
    usable_T = usable_tokens(log_ratio_T, tokens)
    ratio_T = _objective_log_ratio(log_ratio_T.masked_fill(~usable_T, 0.0), tokens).exp()
    positive_T, negative_T = usable_T & (tokens.advantages_T > 0), usable_T & (tokens.advantages_T < 0)
    of_weights = OBJECTIVES.get(settings.objective) is clipped_weight
    dual = float("inf") if settings.clip_ratio_c is None else settings.clip_ratio_c
    return ClippedTokens(
        usable_T=usable_T,
        ratio_T=ratio_T,
        high_T=(usable_T if of_weights else positive_T) & (ratio_T > high),
        low_T=(usable_T if of_weights else negative_T) & (ratio_T < low),
        dual_T=negative_T & (ratio_T > dual),
    )


@torch.no_grad()
def policy_statistics(
    log_probs_T: Tensor, tokens: LossTokens, low: Tensor, high: Tensor, settings: AlgorithmConfig
) -> PolicyLossSums:
    """Return statistics of `policy_loss` on the same tokens."""
    regularized_T = usable_tokens(log_probs_T - tokens.behaviour_log_probs_T, tokens)
    tokens = _advantaged(log_probs_T, tokens, settings)
    clipped = clipped_tokens(log_probs_T, tokens, low, high, settings)
    usable_T, ratio_T = clipped.usable_T, clipped.ratio_T
    log_ratio_T = (log_probs_T - tokens.behaviour_log_probs_T).masked_fill(~usable_T, 0.0)
    log_ratio_T = clamped_log_ratio(log_ratio_T).double()
    contribution_T = contribution_weights(tokens.weights_T, tokens.correction_T, settings)
    gain_T = tokens.advantages_T if contribution_T is None else tokens.advantages_T * contribution_T
    gain_T = gain_T.masked_fill(~usable_T, 0.0).double()
    surrogate_T = _surrogate(ratio_T, gain_T, low, high, settings)
    kl_loss = num_kl_dropped = teacher_kl = num_teacher_dropped = log_ratio_T.new_zeros(())
    if settings.kl_loss_coef and tokens.reference_log_probs_T is not None:
        kl_loss = _kl_loss(log_probs_T, tokens, tokens.weights_T.masked_fill(~regularized_T, 0.0), settings).double()
        num_kl_dropped = _count(regularized_T & (log_probs_T - tokens.reference_log_probs_T).isnan())
    if tokens.teacher_log_probs_T is not None:
        toward_T = toward_teacher(log_probs_T, tokens).advantages_T
        teacher_kl = -toward_T.masked_fill(~usable_T | toward_T.isnan(), 0.0).double().sum()
        num_teacher_dropped = _count(usable_T & toward_T.isnan())
    return PolicyLossSums(
        num_tokens=_count(usable_T),
        num_dropped=_count(_present(tokens)) - _count(usable_T),
        num_positive=_count(usable_T & (tokens.advantages_T > 0)),
        num_negative=_count(usable_T & (tokens.advantages_T < 0)),
        num_clipped_high=_count(clipped.high_T),
        num_clipped_low=_count(clipped.low_T),
        num_clipped_dual=_count(clipped.dual_T),
        k1_kl=-log_ratio_T.sum(),
        k3_kl=(log_ratio_T.expm1() - log_ratio_T).sum(),
        kl_loss=kl_loss,
        num_kl_dropped=num_kl_dropped,
        teacher_kl=teacher_kl,
        num_teacher_dropped=num_teacher_dropped,
        positive_sum=surrogate_T.clamp(min=0).sum(),
        negative_sum=surrogate_T.clamp(max=0).sum().neg(),
    )


def supervised_loss(current_log_probs_T: Tensor, weights_T: Tensor) -> Tensor:
    """Return the weighted negative log-likelihood -sum w log p, 0-d, in nats."""
    return -(weights_T * current_log_probs_T).sum()


def _advantaged(log_probs_T: Tensor, tokens: LossTokens, settings: AlgorithmConfig) -> LossTokens:
    """Return the tokens with the advantages of the objective, which `distill` computes from the current log-probs."""
    return toward_teacher(log_probs_T, tokens) if settings.objective == "distill" else tokens


def _surrogate(ratio_T: Tensor, gain_T: Tensor, low: Tensor, high: Tensor, settings: AlgorithmConfig) -> Tensor:
    """Return the terms of P and N [T], for advantages that are weighted already; PPO's for the user's objective."""
    objective = OBJECTIVES.get(settings.objective)
    if objective is soft_gated:
        return soft_gated(ratio_T.log(), ratio_T, gain_T, low, high, settings)
    clipped_T = ratio_T.clamp(low, high) * gain_T
    if objective is clipped_weight:
        return clipped_T
    surrogate_T = torch.minimum(ratio_T * gain_T, clipped_T)
    if settings.clip_ratio_c is None:
        return surrogate_T
    return torch.where(gain_T < 0, surrogate_T.maximum(settings.clip_ratio_c * gain_T), surrogate_T)


def contribution_weights(weights_T: Tensor, correction_T: Tensor | None, settings: AlgorithmConfig) -> Tensor | None:
    """Return the weights of tokens in P and N and in the search for BAPO's bounds [T]; None: all are 1.

    `weights_T` are those of the loss. `correction_T`, the rollout correction, is 0 for rejected tokens.
    """
    if settings.clip_bounds.weights == "token":
        return correction_T
    return weights_T if correction_T is None else weights_T * correction_T


def _present(tokens: LossTokens) -> Tensor:
    present_T = tokens.weights_T != 0
    return present_T if tokens.correction_T is None else present_T & (tokens.correction_T != 0)


def usable_tokens(log_ratio_T: Tensor, tokens: LossTokens) -> Tensor:
    """Return a mask [T] of the tokens that contribute: not ignored or rejected, and with usable values.

    Values are usable if none is NaN and only the log-ratio is infinite.
    """
    usable_T = _present(tokens) & ~log_ratio_T.detach().isnan()
    usable_T &= tokens.advantages_T.isfinite() & tokens.weights_T.isfinite()
    return usable_T if tokens.correction_T is None else usable_T & tokens.correction_T.isfinite()


def _objective_log_ratio(log_ratio_T: Tensor, tokens: LossTokens) -> Tensor:
    """Return the log-ratio of the sequence if the objective has one, otherwise that of the token."""
    log_ratio_T = clamped_log_ratio(log_ratio_T)
    if tokens.sequence_log_ratio_T is None:
        return log_ratio_T
    return with_token_gradient(tokens.sequence_log_ratio_T, log_ratio_T)


def _kl_loss(log_probs_T: Tensor, tokens: LossTokens, weights_T: Tensor, settings: AlgorithmConfig) -> Tensor:
    assert tokens.reference_log_probs_T is not None, "kl_loss_coef needs a reference model"
    both = (log_probs_T, tokens.reference_log_probs_T)
    excluded_T = (weights_T == 0) | (log_probs_T.detach() - tokens.reference_log_probs_T).isnan()
    kl_T = kl_estimate(settings.kl_loss_type, *(x_T.masked_fill(excluded_T, 0.0) for x_T in both))
    if settings.kl_loss_unbiased:
        log_ratio_T = (log_probs_T - tokens.behaviour_log_probs_T).masked_fill(excluded_T, 0.0)
        kl_T = of_current_policy(settings.kl_loss_type, kl_T, log_ratio_T)
    return (weights_T * kl_T).sum()


def _count(selected_T: Tensor) -> Tensor:
    return selected_T.sum(dtype=torch.float64)
