"""Metrics of an update.

Legend: N response tokens of a micro-batch on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any, get_args

import torch

from megatron_bapo.algorithm.clip_bounds import ClipBounds, Outcome
from megatron_bapo.algorithm.importance import MismatchSums, clamped_log_ratio
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import PolicyLossSums, usable_tokens
from megatron_bapo.metrics.values import Last, Max, Mean, Metric, Sum
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.optimizer import StepResult

DeviceMetric = Mean[Any] | Sum[Any] | Max[Any] | Last[Any]
"""Metric whose values may be 0-d tensors on the device, so that a micro-batch does not wait for them (`read`)."""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@torch.no_grad()
def loss_metrics(
    loss: torch.Tensor,
    tokens: LossTokens,
    sums: PolicyLossSums,
    entropy_N: torch.Tensor,
    log_ratio_N: torch.Tensor,
    *,
    share: float,
) -> dict[str, DeviceMetric]:
    """Return the loss metrics of one micro-batch.

    `share` is 1 / (number of micro-batches of the minibatch on all data- and context-parallel ranks). Losses add up
    over these micro-batches, and the shares add up to 1, so the metric of the minibatch is the loss that is optimized.
    """
    ratio_N = clamped_log_ratio(log_ratio_N).exp().double().masked_fill(~usable_tokens(log_ratio_N, tokens), 0.0)
    largest = torch.cat([ratio_N, ratio_N.new_zeros(1)]).amax()
    of_others: dict[str, DeviceMetric] = {}
    if tokens.reference_log_probs_T is not None:
        of_others["actor/kl_loss_dropped_tokens"] = Sum(sums.num_kl_dropped)
    if tokens.teacher_log_probs_T is not None:
        of_others["actor/teacher_kl"] = Mean(sums.teacher_kl, sums.num_tokens - sums.num_teacher_dropped)
        of_others["actor/teacher_dropped_tokens"] = Sum(sums.num_teacher_dropped)
    return {
        "actor/loss": Mean(loss.detach(), share),
        "actor/entropy": Mean(entropy_N.double().sum(), entropy_N.numel()),
        "actor/ppo_kl": Mean(sums.k1_kl, sums.num_tokens),
        "actor/ppo_kl_k3": Mean(sums.k3_kl, sums.num_tokens),
        "actor/pg_clipfrac": Mean(sums.num_clipped_low + sums.num_clipped_high, sums.num_tokens),
        "actor/pg_clipfrac_lower": Mean(sums.num_clipped_low, sums.num_tokens),
        "actor/pg_clipfrac_upper": Mean(sums.num_clipped_high, sums.num_tokens),
        "actor/pg_clipfrac_dual": Mean(sums.num_clipped_dual, sums.num_tokens),
        "actor/kl_loss": Mean(sums.kl_loss, share),
        **of_others,
        "actor/positive_token_share": Mean(sums.num_positive, sums.num_positive + sums.num_negative),
        "actor/positive_loss_share": Mean(sums.positive_sum, sums.positive_sum + sums.negative_sum),
        "actor/num_positive_tokens": Sum(sums.num_positive),
        "actor/num_negative_tokens": Sum(sums.num_negative),
        "actor/num_dropped_tokens": Sum(sums.num_dropped),
        "actor/ratio_max": Max(largest),
    }


def read(parts: Sequence[Mapping[str, DeviceMetric]]) -> list[dict[str, Metric]]:
    """Return the metrics of all parts as numbers. The host waits for the device once."""
    given = [value for part in parts for metric in part.values() for value in vars(metric).values()]
    tensors = [value.double() for value in given if isinstance(value, torch.Tensor)]
    found = iter(torch.stack(tensors).tolist() if tensors else [])

    def numbers(metric: DeviceMetric) -> Metric:
        return type(metric)(*(next(found) if isinstance(v, torch.Tensor) else v for v in vars(metric).values()))

    return [{name: numbers(metric) for name, metric in part.items()} for part in parts]


def length_metrics(examples: Sequence[Example]) -> dict[str, Metric]:
    """Return the mean response length of a minibatch's trajectories with A > 0 and with A < 0.

    Every rank counts the whole minibatch, so the reduction over ranks does not change the means.
    """
    present = [e for e in examples if e.weight != 0]
    lengths = {
        "positive": [len(e.trajectory.response_token_ids) for e in present if e.advantage_sign > 0],
        "negative": [len(e.trajectory.response_token_ids) for e in present if e.advantage_sign < 0],
    }
    return {f"response_length/{sign}": Mean(sum(values), len(values)) for sign, values in lengths.items()}


def mismatch_metrics(sums: MismatchSums) -> dict[str, DeviceMetric]:
    """Return metrics of the train/rollout mismatch under the same weights, under verl's and NeMo-RL's names."""
    return {
        "training/rollout_probs_diff_mean": Mean(sums.abs_prob_diff_sum, sums.num_tokens),
        "training/rollout_probs_diff_max": Max(sums.abs_prob_diff_max),
        "training/rollout_probs_dropped_tokens": Sum(sums.num_dropped),
        "training/gen_kl_error": Mean(sums.k3_kl_sum, sums.num_tokens),
        "training/token_mult_prob_error": Mean(sums.mult_prob_error_sum, sums.num_tokens),
        "training/sampling_importance_ratio": Mean(sums.importance_ratio_sum, sums.num_tokens),
    }


def bounds_metrics(bounds: ClipBounds | None) -> dict[str, Metric]:
    if bounds is None:
        return {}
    low, high, share, initial, positive, negative = torch.stack(
        [
            *(bounds.low, bounds.high, bounds.positive_share, bounds.initial_positive_share),
            *(bounds.positive_sum, bounds.negative_sum),
        ]
    ).tolist()
    shares = {"bapo_positive_share": share, "bapo_initial_positive_share": initial}
    return {
        "actor/bapo_clip_low": Mean(low, 1.0),
        "actor/bapo_clip_high": Mean(high, 1.0),
        **{  # a share is NaN where no token contributes
            f"actor/{name}": Mean(0.0, 0.0) if isnan(value) else Mean(value, 1.0) for name, value in shares.items()
        },
        "actor/bapo_positive_sum": Mean(positive, 1.0),
        "actor/bapo_negative_sum": Mean(negative, 1.0),
        **{f"actor/bapo_outcome/{name}": Mean(float(bounds.outcome == name), 1.0) for name in OUTCOMES},
    }


def speculation_metrics(*, speculated: bool, missed: bool) -> dict[str, Metric]:
    """Return whether the update trained under predicted bounds, and whether the prediction, used or not, was right."""
    return {
        "actor/bapo_speculated": Mean(float(speculated), 1.0),
        "actor/bapo_speculation_hit": Mean(float(not missed), 1.0),
    }


def step_metrics(step: StepResult | None, lr: float) -> dict[str, Metric]:
    """Return the metrics of an optimizer step; `step` is None if an empty minibatch left nothing to do."""
    metrics: dict[str, Metric] = {
        "actor/skipped_updates": Mean(float(step is None or step.skipped), 1.0),
        "actor/empty_minibatches": Mean(float(step is None), 1.0),
        "actor/lr": Last(lr),
    }
    if step is not None:
        metrics |= {"actor/grad_norm": Mean(step.grad_norm, 1.0), "actor/grad_norm_max": Max(step.grad_norm)}
    return metrics
