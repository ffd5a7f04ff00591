"""Trains one minibatch by its clip bounds: found before the training pass, during it, or for each micro-batch.

    scope        method       passes over the minibatch
    minibatch    score        forward only, search, training
    minibatch    speculate    training by predicted bounds, search; again by the exact ones if they are others
    microbatch   -            training, with a search in each micro-batch's forward pass

The prediction takes every ratio to be 1. Where the ratio's denominators are the trainer's own, under its present
weights, that is no prediction but settles the bounds. Where engines with the present weights gave them, it is wrong by
their arithmetic alone, and next to the target that may be enough to move the bounds: such fresh minibatches are trained
at once and checked, whatever the method, unless FP8 scales remember passes, which then cannot be repeated.

Predicted bounds follow from the sums of positive and negative advantages, which decide between the first and the last
bounds almost alone. In 492 updates of two runs on the quickstart's task, 8 updates a rollout batch, the prediction was
right in 99% with a target of 0.4, and in 83% with 0.5, the hardest, which is the median share there; the previous
update's bounds were right in 98% and 53%, the ratios of earlier updates no better.

Only the last pipeline stage has log-probs, and so bounds. What the other ranks need to know is one small maximum over
all ranks. Sums of the search go over data- and context-parallel ranks only: tensor-parallel ranks hold the same tokens.

Legend: N response tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_bapo.algorithm.clip_bounds import ClipBounds, find_clip_bounds
from megatron_bapo.metrics.values import Metric
from megatron_bapo.parallel.collectives import max_over, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device, now_s
from megatron_bapo.trainer.micro_batches import MicroBatch
from megatron_bapo.trainer.update_metrics import bounds_metrics, speculation_metrics
from megatron_bapo.trainer.worker import Scores, Worker, score

Limits = tuple[torch.Tensor, torch.Tensor]
"""The clip bounds (low, high) of the loss, 0-d."""


@dataclass(frozen=True)
class Trained:
    """What the training pass leaves of one micro-batch."""

    metrics: dict[str, Metric]
    scores: Scores


@dataclass(frozen=True)
class TrainedMinibatch:
    """Of the training pass that counts."""

    micro_batches: list[Trained]
    metrics: dict[str, Metric]
    """Of the bounds."""
    scored: bool
    """Whether another pass gave the ratios before: forward only, or a training pass by bounds that were wrong."""


TrainingPass = Callable[[Limits | None], list[Trained]]
"""Gradients of the whole minibatch, from zero, by these bounds; without them each micro-batch finds its own."""


def train_within_bounds(
    worker: Worker, micro_batches: Sequence[MicroBatch], train: TrainingPass, *, on_policy: bool, sampled_now: bool
) -> TrainedMinibatch:
    """Leave the gradients that belong to the minibatch's bounds.

    `on_policy` and `sampled_now` say that the trainer, or engines, computed the behaviour log-probs with the present
    weights.
    """
    algorithm = worker.config.algorithm
    if algorithm.objective != "bapo":
        low, high = 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high
        limits = torch.tensor(low, device=local_device()), torch.tensor(high, device=local_device())
        return TrainedMinibatch(train(limits), {}, scored=False)
    if algorithm.clip_bounds.scope == "microbatch":
        return TrainedMinibatch(train(None), {}, scored=False)
    if on_policy:
        bounds = _bounds(worker, micro_batches, None)
        return TrainedMinibatch(train(_limits(bounds)), bounds_metrics(bounds), scored=False)
    fp8 = worker.config.fp8
    if sampled_now and not (fp8 and fp8.remembers_passes):
        return _train_and_check(worker, micro_batches, train)
    if algorithm.clip_bounds.method == "speculate":
        return _speculate(worker, micro_batches, train)
    bounds = _bounds(worker, micro_batches, _score(worker, micro_batches))
    return TrainedMinibatch(train(_limits(bounds)), bounds_metrics(bounds), scored=True)


def _train_and_check(worker: Worker, micro_batches: Sequence[MicroBatch], train: TrainingPass) -> TrainedMinibatch:
    """Train by the predicted bounds, and again where those of the loss's ratios are others."""
    predicted = _bounds(worker, micro_batches, None)
    results = train(_limits(predicted))
    exact = _bounds(worker, micro_batches, [result.scores for result in results])
    missed = any(_largest([_differ(predicted, exact)], worker.groups))
    if missed:
        results = train(_limits(exact))
    metrics = bounds_metrics(exact) | speculation_metrics(speculated=True, missed=missed)
    return TrainedMinibatch(results, metrics, scored=missed)


def _speculate(worker: Worker, micro_batches: Sequence[MicroBatch], train: TrainingPass) -> TrainedMinibatch:
    """Train at once where that pays, else score, and compare the prediction all the same."""
    if worker.speculation.pays:
        trained = _train_and_check(worker, micro_batches, train)
        worker.speculation.record(missed=trained.scored)
        return trained
    predicted, start = _bounds(worker, micro_batches, None), now_s()
    exact = _bounds(worker, micro_batches, _score(worker, micro_batches))
    scored = now_s()
    results = train(_limits(exact))
    seconds = scored - start, now_s() - scored
    differ, scoring_s, training_s = _largest((_differ(predicted, exact), *seconds), worker.groups)
    worker.speculation.record(missed=bool(differ), scoring_cost=scoring_s / training_s)
    metrics = bounds_metrics(exact) | speculation_metrics(speculated=False, missed=bool(differ))
    return TrainedMinibatch(results, metrics, scored=True)


def micro_batch_limits(worker: Worker, micro_batch: MicroBatch, scores: Scores) -> tuple[Limits, dict[str, Metric]]:
    """Bounds of one micro-batch and of those that the other data- and context-parallel ranks train beside it.

    A collective within the pipeline's schedule, and safe there: these ranks run equally many micro-batches, and the
    last stages of their pipelines run them in the same order.
    """
    bounds = _bounds(worker, [micro_batch], [scores])
    assert bounds is not None, "only the last pipeline stage has scores"
    return (bounds.low.float(), bounds.high.float()), bounds_metrics(bounds)


def _score(worker: Worker, micro_batches: Sequence[MicroBatch]) -> list[Scores]:
    return score(worker, micro_batches, worker.config.rollout.temperature)


def _bounds(worker: Worker, micro_batches: Sequence[MicroBatch], scores: Sequence[Scores] | None) -> ClipBounds | None:
    """The same on every rank of the last pipeline stage, None elsewhere; without scores every ratio is 1."""
    if not worker.groups.is_last_stage:
        return None
    behaviour_N, advantages_N, weights_N, corrections_N = (
        torch.cat([getattr(m, name) for m in micro_batches])
        for name in ("behaviour_log_probs_N", "advantages_N", "weights_N", "corrections_N")
    )
    algorithm = worker.config.algorithm
    current_N = behaviour_N if scores is None else torch.cat([s.log_probs_N for s in scores])
    contributions_N = corrections_N if algorithm.rollout_correction.active else None  # of rejected tokens 0
    if algorithm.clip_bounds.weights == "loss":
        contributions_N = weights_N * corrections_N
    return find_clip_bounds(
        current_N - behaviour_N,
        advantages_N,
        algorithm.clip_bounds,
        mask=weights_N != 0,
        weights=contributions_N,
        reduce=sum_over(worker.groups.data_context),
    )


def _differ(predicted: ClipBounds | None, exact: ClipBounds | None) -> float:
    """1 or 0; ranks without bounds learn it from the others."""
    return float(predicted is not None and exact is not None and predicted.moves != exact.moves)


def _limits(bounds: ClipBounds | None) -> Limits | None:
    """Other pipeline stages than the last get none and need none."""
    return None if bounds is None else (bounds.low.float(), bounds.high.float())


def _largest(values: Sequence[float], groups: ParallelGroups) -> list[float]:
    """Of each value over all ranks."""
    largest = torch.tensor(values, dtype=torch.float64, device=local_device())
    max_over(groups.tensor, groups.data_context, groups.pipeline)(largest)
    return largest.tolist()
