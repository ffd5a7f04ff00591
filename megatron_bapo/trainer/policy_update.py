"""One optimizer update on one minibatch: find the clip bounds, then compute the policy gradient.

Legend: T packed tokens of a micro-batch on this rank, N its response tokens, C those of one chunk, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_bapo.algorithm.importance import mismatch_sums
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.objectives import sequence_log_ratios
from megatron_bapo.algorithm.policy_loss import (
    clipped_tokens,
    policy_loss,
    policy_statistics,
    supervised_loss,
    usable_tokens,
)
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.metrics.values import Mean, Metric, from_vectors, merge, to_vectors
from megatron_bapo.model.vocab_parallel import OutputLayer, log_probs_and_entropy, token_loss
from megatron_bapo.parallel.collectives import broadcast_object_from_last_stage, max_over, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.trainer.bound_scopes import Bounds, PassResult, micro_batch_bounds, train_within_bounds
from megatron_bapo.trainer.entropy_change import measured_entropy_change, predicted_entropy_change
from megatron_bapo.trainer.micro_batches import Example, MicroBatch
from megatron_bapo.trainer.off_policy_mask import off_policy_mask, without_masked
from megatron_bapo.trainer.schedule import run_micro_batches
from megatron_bapo.trainer.token_reservoir import TokenReservoir
from megatron_bapo.trainer.token_trace import TokenTrace
from megatron_bapo.trainer.update_metrics import (
    DeviceMetric,
    length_metrics,
    loss_metrics,
    mismatch_metrics,
    read,
    step_metrics,
)
from megatron_bapo.trainer.utilization import update_flops
from megatron_bapo.trainer.worker import Scores, Worker, response_outputs


def update_policy(
    worker: Worker,
    examples: Sequence[Example],
    *,
    lr: float,
    on_policy: bool,
    fresh_rollout: bool = False,
    reservoir: TokenReservoir | None = None,
    trace: TokenTrace | None = None,
) -> dict[str, Metric]:
    """Run one update on the configured objective and return the metrics of this rank.

    Only the last pipeline stage returns metrics. `on_policy`: the trainer computed the behaviour log-probs with the
    current weights, so every ratio is 1. `fresh_rollout`: engines with the current weights generated the rollout, so
    log-probs differ by arithmetic only. `reservoir` and `trace` store tokens. Without examples nothing changes.
    """
    config, algorithm, temperature = worker.config, worker.config.algorithm, worker.config.rollout.temperature
    if reservoir is not None:
        examples = reservoir.choose(examples)
    if not examples:
        return step_metrics(None, lr) | update_flops(worker, [], scored=False)
    micro_batches = worker.micro_batches(examples)
    share = 1.0 / (len(micro_batches) * worker.groups.data_context.size)

    def head(bounds: Bounds | None, micro_batch: MicroBatch, hidden_TH: Tensor) -> tuple[Tensor, PassResult]:
        outputs = response_outputs(worker, micro_batch, hidden_TH)
        tokens, (low, high), found = _loss_arguments(worker, micro_batch, outputs, bounds)

        def loss_of(log_probs_C: Tensor, entropy_C: Tensor, chunk: slice) -> Tensor:
            return policy_loss(log_probs_C, entropy_C, tokens[chunk], low, high, algorithm, fused=worker.fused_kernels)

        loss, log_probs_N, entropy_N = token_loss(
            *outputs, loss_of, temperature=temperature, entropy_requires_grad=algorithm.entropy_coeff != 0.0
        )
        sums = policy_statistics(log_probs_N, tokens, low, high, algorithm)
        log_ratio_N = log_probs_N - tokens.behaviour_log_probs_T
        metrics = {**loss_metrics(loss, tokens, sums, entropy_N, log_ratio_N, share=share), **found}
        scores = Scores(log_probs_N, entropy_N)
        _store(reservoir, trace, micro_batch, scores, tokens, (low, high), algorithm)
        if fresh_rollout:
            metrics |= mismatch_metrics(mismatch_sums(log_probs_N, micro_batch.rollout_log_probs_N))
        if config.logging.entropy_clip_rule:
            learned = replace(micro_batch, advantages_N=tokens.advantages_T)
            metrics |= predicted_entropy_change(learned, scores, low, high, algorithm.clip_ratio_c)
        if tokens.masked_T is not None:
            metrics |= {"actor/off_policy_masked_share": Mean(tokens.masked_T.sum(), sums.num_tokens)}
        return loss, PassResult(metrics, scores)

    def train(bounds: Bounds | None) -> list[PassResult]:
        worker.optimizer.zero_grad()
        return run_micro_batches(worker.model, micro_batches, partial(head, bounds), forward_only=False)

    trained = train_within_bounds(worker, micro_batches, train, on_policy=on_policy, fresh_rollout=fresh_rollout)
    metrics = merge(read([r.metrics for r in trained.micro_batches])) | trained.metrics | length_metrics(examples)
    metrics |= update_flops(worker, examples, scored=trained.scored) | step_metrics(worker.optimizer.step(lr), lr)
    if config.logging.entropy_clip_rule:
        metrics |= measured_entropy_change(worker, micro_batches, [r.scores for r in trained.micro_batches])
    return metrics


def _loss_arguments(
    worker: Worker, micro_batch: MicroBatch, outputs: tuple[Tensor, OutputLayer, Tensor], bounds: Bounds | None
) -> tuple[LossTokens, Bounds, dict[str, Metric]]:
    """Return the per-token inputs of the loss, the bounds, and the metrics of bounds that are found here.

    What depends on the current log-probs of a whole micro-batch or of whole responses costs one more pass of the output
    layer.
    """
    log_probs_N, found = None, dict[str, Metric]()
    if bounds is None or worker.config.algorithm.compares_responses:
        with torch.no_grad():
            scores = Scores(*log_probs_and_entropy(*outputs, temperature=worker.config.rollout.temperature))
        if bounds is None:
            bounds, found = micro_batch_bounds(worker, micro_batch, scores)
        log_probs_N = scores.log_probs_N
    return loss_tokens(worker, micro_batch, log_probs_N), bounds, found


def _store(
    reservoir: TokenReservoir | None,
    trace: TokenTrace | None,
    micro_batch: MicroBatch,
    scores: Scores,
    tokens: LossTokens,
    bounds: Bounds,
    algorithm: AlgorithmConfig,
) -> None:
    """Store the tokens of a micro-batch that the reservoir and the trace have chosen."""
    if reservoir is not None:
        reservoir.add(micro_batch, scores.log_probs_N, scores.entropy_N)
    if trace is not None and len(micro_batch.traced_K):
        clipped = clipped_tokens(scores.log_probs_N, tokens, *bounds, algorithm)
        trace.add(micro_batch, scores, clipped, bounds, tokens.masked_T)


def loss_tokens(worker: Worker, micro_batch: MicroBatch, log_probs_N: Tensor | None) -> LossTokens:
    """Return the per-token inputs of the policy loss for a micro-batch.

    GSPO and off-policy sequence masking need the current log-probs.
    """
    config = worker.config
    masked_N = None if log_probs_N is None else off_policy_mask(worker, micro_batch, log_probs_N)
    tokens = LossTokens(
        micro_batch.behaviour_log_probs_N,
        without_masked(micro_batch, masked_N).advantages_N,
        micro_batch.weights_N,
        micro_batch.corrections_N if config.algorithm.rollout_correction.active else None,
        micro_batch.reference_log_probs_N if config.algorithm.kl_loss_coef else None,
        teacher_log_probs_T=micro_batch.teacher_log_probs_N if config.algorithm.distillation is not None else None,
        masked_T=masked_N,
    )
    if config.algorithm.objective != "gspo":
        return tokens
    assert log_probs_N is not None, "GSPO's ratios need all log-probs of a response"
    log_ratio_N = log_probs_N - micro_batch.behaviour_log_probs_N
    sequence_log_ratio_N = sequence_log_ratios(
        log_ratio_N,
        usable_tokens(log_ratio_N, tokens),
        micro_batch.sequence_index_N,
        micro_batch.num_sequences,
        sum_over(worker.groups.context),
    )
    return replace(tokens, sequence_log_ratio_T=sequence_log_ratio_N)


def supervised_update(worker: Worker, examples: Sequence[Example], lr: float) -> dict[str, Metric]:
    """Run one update on the negative log-likelihood of the examples; metrics are returned as in `update_policy`."""

    def head(micro_batch: MicroBatch, hidden_TH: Tensor) -> tuple[Tensor, dict[str, DeviceMetric]]:
        weights_N = micro_batch.weights_N
        loss, _, _ = token_loss(
            *response_outputs(worker, micro_batch, hidden_TH),
            lambda log_probs_C, _, chunk: supervised_loss(log_probs_C, weights_N[chunk]),
            temperature=1.0,
        )
        return loss, {"actor/loss": Mean(loss.detach(), weights_N.sum())}

    worker.optimizer.zero_grad()
    parts = run_micro_batches(worker.model, worker.micro_batches(examples), head, forward_only=False)
    return merge(read(parts)) | step_metrics(worker.optimizer.step(lr), lr)


def reduce_updates(updates: Sequence[dict[str, Metric]], groups: ParallelGroups) -> list[dict[str, Metric]]:
    """Reduce the metrics of each update over the data- and context-parallel ranks of the last pipeline stage.

    Every stage gets the result. Two collectives reduce any number of updates.
    """
    reduced = [dict[str, Metric]() for _ in updates]
    if groups.is_last_stage:
        together = {
            (f"{index}/{name}"): metric for index, update in enumerate(updates) for name, metric in update.items()
        }
        sums, maxima = (torch.from_numpy(v).to(local_device()) for v in to_vectors(together))
        sum_over(groups.data_context)(sums)
        max_over(groups.data_context)(maxima)
        for key, metric in from_vectors(together, sums.cpu().numpy(), maxima.cpu().numpy()).items():
            index, _, name = key.partition("/")
            reduced[int(index)][name] = metric
    return broadcast_object_from_last_stage(reduced, groups)


def reduce_metrics(metrics: dict[str, Metric], groups: ParallelGroups) -> dict[str, Metric]:
    """Reduce the metrics of one update as `reduce_updates` does."""
    return reduce_updates([metrics], groups)[0]
