"""Predicted (Entropy-Clip Rule) and measured entropy change of an update, enabled by `logging.entropy_clip_rule`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_bapo.algorithm.entropy_clip_rule import sampled_entropy_change
from megatron_bapo.metrics.values import Mean, Metric
from megatron_bapo.trainer.micro_batches import MicroBatch
from megatron_bapo.trainer.update_metrics import DeviceMetric
from megatron_bapo.trainer.worker import Scores, Worker, score


def predicted_entropy_change(
    micro_batch: MicroBatch, scores: Scores, low: torch.Tensor, high: torch.Tensor, clip_ratio_c: float | None
) -> dict[str, DeviceMetric]:
    """Return the predicted entropy change per token and per unit of the logit step.

    The size of the step is unknown, so only sign and trend can be compared with the measurement. A rollout correction
    is a factor of a token's advantage, and excludes the tokens that it rejects.
    """
    arguments = (
        scores.log_probs_N,
        micro_batch.behaviour_log_probs_N,
        scores.entropy_N,
        micro_batch.advantages_N * micro_batch.corrections_N,
        low,
        high,
    )
    weights_N = micro_batch.weights_N.double() * (micro_batch.corrections_N != 0)
    dual = float("inf") if clip_ratio_c is None else clip_ratio_c
    gradient, printed = (
        (sampled_entropy_change(*arguments, form, dual) * weights_N).sum() for form in ("gradient", "printed")
    )
    return {
        "actor/entropy_clip_rule/predicted": Mean(gradient, weights_N.sum()),
        "actor/entropy_clip_rule/predicted_as_printed": Mean(printed, weights_N.sum()),
    }


def measured_entropy_change(
    worker: Worker, micro_batches: Sequence[MicroBatch], before: Sequence[Scores]
) -> dict[str, Metric]:
    """Measure the entropy change in nats per token with a forward pass after the update; last pipeline stage only."""
    after = score(worker, micro_batches, worker.config.rollout.temperature)
    change = sum((now.entropy_N.double() - then.entropy_N).sum() for now, then in zip(after, before, strict=True))
    return {"actor/entropy_clip_rule/measured": Mean(float(change), sum(scores.entropy_N.numel() for scores in before))}
