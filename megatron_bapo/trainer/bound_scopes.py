"""Trains one minibatch under its clip bounds, which are found before the training pass, during it, or per micro-batch.

    scope        method       passes over the minibatch
    minibatch    score        forward only, search, training; one micro-batch: training, with a search in it
    minibatch    speculate    training under predicted bounds, search; repeated under the exact bounds if they differ
    microbatch   -            training, with a search in the forward pass of each micro-batch

The prediction assumes that every ratio is 1. If the trainer computed the behaviour log-probs with its current weights,
this holds exactly and the predicted bounds are final. If engines with the current weights computed them, the ratios
differ from 1 by arithmetic only, which can still move the bounds when the share is close to the target. Such fresh
minibatches are therefore trained at once and then checked, whatever the method, unless the FP8 scales depend on
earlier passes, because a training pass then cannot be repeated.

Predicted bounds follow from the sums of positive and negative advantages, which almost always decide between the first
and the last bounds. In 492 updates of two runs on the quickstart task, with 8 updates per rollout batch, the prediction
was right in 99% of the updates with a target of 0.4 and in 83% with a target of 0.5, the hardest case because it is the
median share there. The bounds of the previous update were right in 98% and 53%; ratios of earlier updates did no
better.

A minibatch of one micro-batch on each rank needs no scoring pass: between its forward and its backward pass all ranks
have the log-probs of the whole minibatch. The search there costs another pass of the output layer only.

Only the last pipeline stage has log-probs and therefore bounds. The other ranks learn the outcome from one small
maximum over all ranks. The sums of the search are reduced over data- and context-parallel ranks only, because
tensor-parallel ranks have the same tokens.

Legend: N response tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_bapo.algorithm.clip_bounds import ClipBounds, find_clip_bounds
from megatron_bapo.algorithm.policy_loss import contribution_weights
from megatron_bapo.metrics.values import Metric
from megatron_bapo.parallel.collectives import max_over, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device, now_s
from megatron_bapo.trainer.micro_batches import MicroBatch
from megatron_bapo.trainer.off_policy_mask import off_policy_mask, without_masked
from megatron_bapo.trainer.update_metrics import DeviceMetric, bounds_metrics, speculation_metrics
from megatron_bapo.trainer.worker import Scores, Worker, score

Bounds = tuple[torch.Tensor, torch.Tensor]
"""Clip bounds (low, high) of the loss, 0-d."""


@dataclass(frozen=True)
class PassResult:
    """Result of the training pass for one micro-batch."""

    metrics: dict[str, DeviceMetric]
    scores: Scores


@dataclass(frozen=True)
class MinibatchResult:
    """Result of the training pass whose gradients are used."""

    micro_batches: list[PassResult]
    metrics: dict[str, Metric]
    """Metrics of the bounds."""
    scored: bool
    """Whether an earlier pass computed the ratios: a scoring pass, or a training pass under mispredicted bounds."""


TrainingPass = Callable[[Bounds | None], list[PassResult]]
"""Computes the gradients of the whole minibatch, from zero, under the given bounds.

Without bounds each micro-batch finds its own."""


def train_within_bounds(
    worker: Worker,
    micro_batches: Sequence[MicroBatch],
    train: TrainingPass,
    *,
    on_policy: bool,
    fresh_rollout: bool,
) -> MinibatchResult:
    """Compute the gradients of the minibatch under its clip bounds and return the results of that training pass.

    `on_policy` and `fresh_rollout` say that the trainer, or the engines, computed the behaviour log-probs with the
    current weights.
    """
    algorithm = worker.config.algorithm
    if algorithm.objective != "bapo":
        low, high = (torch.tensor(bound, device=local_device()) for bound in algorithm.fixed_bounds)
        return MinibatchResult(train((low, high)), {}, scored=False)
    if algorithm.clip_bounds.scope == "microbatch":
        return MinibatchResult(train(None), {}, scored=False)
    if on_policy:
        bounds = _bounds(worker, micro_batches, None)
        return MinibatchResult(train(_as_bounds(bounds)), bounds_metrics(bounds), scored=False)
    fp8 = worker.config.fp8
    if fresh_rollout and not (fp8 and fp8.uses_delayed_scaling):
        return _train_and_check(worker, micro_batches, train)
    if algorithm.clip_bounds.method == "speculate":
        return _speculate(worker, micro_batches, train)
    if len(micro_batches) == 1:  # on every rank, so the bounds of the micro-batch are those of the minibatch
        return MinibatchResult(train(None), {}, scored=False)
    bounds = _bounds(worker, micro_batches, _score(worker, micro_batches))
    return MinibatchResult(train(_as_bounds(bounds)), bounds_metrics(bounds), scored=True)


def _train_and_check(worker: Worker, micro_batches: Sequence[MicroBatch], train: TrainingPass) -> MinibatchResult:
    """Train under the predicted bounds, and again if the exact bounds differ."""
    predicted = _bounds(worker, micro_batches, None)
    results = train(_as_bounds(predicted))
    exact = _bounds(worker, micro_batches, [result.scores for result in results])
    missed = any(_largest([_differ(predicted, exact)], worker.groups))
    if missed:
        results = train(_as_bounds(exact))
    metrics = bounds_metrics(exact) | speculation_metrics(speculated=True, missed=missed)
    return MinibatchResult(results, metrics, scored=missed)


def _speculate(worker: Worker, micro_batches: Sequence[MicroBatch], train: TrainingPass) -> MinibatchResult:
    """Train under predicted bounds if that pays; otherwise score first, and still check the prediction."""
    if worker.speculation.pays:
        trained = _train_and_check(worker, micro_batches, train)
        worker.speculation.record(missed=trained.scored)
        return trained
    predicted, start = _bounds(worker, micro_batches, None), now_s()
    exact = _bounds(worker, micro_batches, _score(worker, micro_batches))
    scored = now_s()
    results = train(_as_bounds(exact))
    seconds = scored - start, now_s() - scored
    differ, scoring_s, training_s = _largest((_differ(predicted, exact), *seconds), worker.groups)
    worker.speculation.record(missed=bool(differ), scoring_cost=scoring_s / training_s)
    metrics = bounds_metrics(exact) | speculation_metrics(speculated=False, missed=bool(differ))
    return MinibatchResult(results, metrics, scored=True)


def micro_batch_bounds(worker: Worker, micro_batch: MicroBatch, scores: Scores) -> tuple[Bounds, dict[str, Metric]]:
    """Return the bounds of one micro-batch together with its counterparts on other data- and context-parallel ranks.

    This is a collective within the pipeline schedule. It is safe because these ranks run equally many micro-batches,
    and their last pipeline stages run them in the same order.
    """
    bounds = _bounds(worker, [micro_batch], [scores])
    assert bounds is not None, "only the last pipeline stage has scores"
    return (bounds.low.float(), bounds.high.float()), bounds_metrics(bounds)


def _score(worker: Worker, micro_batches: Sequence[MicroBatch]) -> list[Scores]:
    return score(worker, micro_batches, worker.config.rollout.temperature)


def _bounds(worker: Worker, micro_batches: Sequence[MicroBatch], scores: Sequence[Scores] | None) -> ClipBounds | None:
    """Find the bounds on all ranks of the last pipeline stage (None elsewhere); without scores every ratio is 1."""
    if not worker.groups.is_last_stage:
        return None
    current = [m.behaviour_log_probs_N for m in micro_batches] if scores is None else [s.log_probs_N for s in scores]
    micro_batches = [
        without_masked(micro_batch, off_policy_mask(worker, micro_batch, log_probs_N))
        for micro_batch, log_probs_N in zip(micro_batches, current, strict=True)
    ]
    behaviour_N, advantages_N, weights_N, corrections_N = (
        torch.cat([getattr(m, name) for m in micro_batches])
        for name in ("behaviour_log_probs_N", "advantages_N", "weights_N", "corrections_N")
    )
    algorithm = worker.config.algorithm
    corrections_N = corrections_N if algorithm.rollout_correction.active else None
    return find_clip_bounds(
        torch.cat(current) - behaviour_N,
        advantages_N,
        algorithm.clip_bounds,
        mask=weights_N != 0,
        weights=contribution_weights(weights_N, corrections_N, algorithm),
        reduce=sum_over(worker.groups.data_context),
    )


def _differ(predicted: ClipBounds | None, exact: ClipBounds | None) -> float:
    """Return 1 if the bounds differ and 0 if not; ranks without bounds return 0 and learn the result from others."""
    return float(predicted is not None and exact is not None and predicted.moves != exact.moves)


def _as_bounds(bounds: ClipBounds | None) -> Bounds | None:
    """Return the bounds as the loss takes them; None on all pipeline stages but the last, which need none."""
    return None if bounds is None else (bounds.low.float(), bounds.high.float())


def _largest(values: Sequence[float], groups: ParallelGroups) -> list[float]:
    """Return the maximum of each value over all ranks."""
    largest = torch.tensor(values, dtype=torch.float64, device=local_device())
    max_over(groups.tensor, groups.data_context, groups.pipeline)(largest)
    return largest.tolist()
