"""One optimizer update from one minibatch: clip bounds first, then the clipped policy gradient.

Legend: T packed tokens of a micro-batch on this rank, N its response tokens, C those of one chunk, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from megatron_bapo.algorithm.clip_bounds import ClipBounds, find_clip_bounds
from megatron_bapo.algorithm.importance import MismatchSums, mismatch_sums
from megatron_bapo.algorithm.policy_loss import PolicyLossSums, policy_loss, supervised_loss
from megatron_bapo.metrics.values import Last, Max, Mean, Metric, Sum, from_vectors, merge, to_vectors
from megatron_bapo.model.vocab_parallel import token_loss
from megatron_bapo.parallel.collectives import broadcast_object_from_last_stage, max_over, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.trainer.micro_batches import Example, MicroBatch
from megatron_bapo.trainer.optimizer import StepResult
from megatron_bapo.trainer.schedule import run_micro_batches
from megatron_bapo.trainer.worker import Worker, response_outputs, score

OUTCOMES = ("start", "interior", "end", "no_signal")


def update_policy(worker: Worker, examples: Sequence[Example], *, lr: float, on_policy: bool) -> dict[str, Metric]:
    """One BAPO (or PPO) update; this rank's metrics, empty but on the last pipeline stage.

    `on_policy` says that the examples were sampled from the current weights: every ratio is 1, so the bounds need no
    scoring pass.
    """
    config = worker.config
    micro_batches = worker.micro_batches(examples)
    bounds = minibatch_bounds(worker, micro_batches, on_policy=on_policy)
    low, high = _limits(worker, bounds)

    def head(micro_batch: MicroBatch, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        outputs = response_outputs(worker, micro_batch, hidden_TH)
        behaviour_N, advantages_N, weights_N = (
            micro_batch.behaviour_log_probs_N, micro_batch.advantages_N, micro_batch.weights_N,
        )  # fmt: skip

        def loss_of(log_probs_C: torch.Tensor, _: torch.Tensor, chunk: slice) -> torch.Tensor:
            return policy_loss(log_probs_C, behaviour_N[chunk], advantages_N[chunk], weights_N[chunk], low, high)[0]

        loss, log_probs_N, entropy_N = token_loss(*outputs, loss_of, temperature=config.rollout.temperature)
        _, sums = policy_loss(log_probs_N, behaviour_N, advantages_N, weights_N, low, high)
        metrics = _loss_metrics(loss, weights_N, sums, entropy_N)
        if on_policy:
            metrics |= _mismatch_metrics(mismatch_sums(log_probs_N, behaviour_N))
        return loss, metrics

    return _step(worker, micro_batches, head, lr) | _bounds_metrics(bounds)


def supervised_update(worker: Worker, examples: Sequence[Example], lr: float) -> dict[str, Metric]:
    """One update on the examples' negative log-likelihood; metrics as in `update_policy`."""

    def head(micro_batch: MicroBatch, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        weights_N = micro_batch.weights_N
        loss, _, _ = token_loss(
            *response_outputs(worker, micro_batch, hidden_TH),
            lambda log_probs_C, _, chunk: supervised_loss(log_probs_C, weights_N[chunk]),
            temperature=1.0,
        )
        return loss, {"actor/loss": Mean(loss.item(), weights_N.sum().item())}

    return _step(worker, worker.micro_batches(examples), head, lr)


def minibatch_bounds(worker: Worker, micro_batches: Sequence[MicroBatch], *, on_policy: bool) -> ClipBounds | None:
    """BAPO's bounds for the whole minibatch, the same on every rank of the last pipeline stage; None elsewhere.

    Sums go over data- and context-parallel ranks only: tensor-parallel ranks hold identical log-probs.
    """
    algorithm, groups = worker.config.algorithm, worker.groups
    if algorithm.objective != "bapo":
        return None
    advantages_N = torch.cat([m.advantages_N for m in micro_batches])
    log_ratio_N = torch.zeros_like(advantages_N)
    if not on_policy:
        scores = score(worker, micro_batches, worker.config.rollout.temperature)
        if groups.is_last_stage:
            current_N = torch.cat([s.log_probs_N for s in scores])
            log_ratio_N = current_N - torch.cat([m.behaviour_log_probs_N for m in micro_batches])
    if not groups.is_last_stage:
        return None
    return find_clip_bounds(log_ratio_N, advantages_N, algorithm.clip_bounds, reduce=sum_over(groups.data_context))


def _limits(worker: Worker, bounds: ClipBounds | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The 0-d clip bounds of the loss."""
    if bounds is not None:
        return bounds.low.float(), bounds.high.float()
    algorithm = worker.config.algorithm
    low, high = 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high
    return torch.tensor(low, device=local_device()), torch.tensor(high, device=local_device())


def _step(
    worker: Worker,
    micro_batches: Sequence[MicroBatch],
    head: Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, dict[str, Metric]]],
    lr: float,
) -> dict[str, Metric]:
    """Forward, backward, optimizer step."""
    worker.optimizer.zero_grad()
    metrics = merge(run_micro_batches(worker.model, micro_batches, head, forward_only=False))
    return metrics | _step_metrics(worker.optimizer.step(lr), lr)


def _loss_metrics(
    loss: torch.Tensor, weights_N: torch.Tensor, sums: PolicyLossSums, entropy_N: torch.Tensor
) -> dict[str, Metric]:
    fields = [getattr(sums, field.name) for field in dataclasses.fields(sums)]
    own = [entropy_N.double().sum(), loss.detach().double(), weights_N.double().sum()]
    entropy, total, weight, *values = torch.stack([*own, *fields]).tolist()
    of = dict(zip((field.name for field in dataclasses.fields(sums)), values, strict=True))
    num = of["num_tokens"]
    return {
        "actor/loss": Mean(total, weight),
        "actor/entropy": Mean(entropy, entropy_N.numel()),
        "actor/ppo_kl": Mean(of["k1_kl"], num),
        "actor/ppo_kl_k3": Mean(of["k3_kl"], num),
        "actor/pg_clipfrac": Mean(of["num_clipped_low"] + of["num_clipped_high"], num),
        "actor/pg_clipfrac_lower": Mean(of["num_clipped_low"], num),
        "actor/pg_clipfrac_upper": Mean(of["num_clipped_high"], num),
        "actor/positive_token_share": Mean(of["num_positive"], of["num_positive"] + of["num_negative"]),
        "actor/num_dropped_tokens": Sum(of["num_dropped"]),
    }


def _mismatch_metrics(sums: MismatchSums) -> dict[str, Metric]:
    """How far the engine's log-probs are from the trainer's under the same weights, in verl's names."""
    num = float(sums.num_tokens)
    return {
        "training/rollout_probs_diff_mean": Mean(float(sums.abs_prob_diff_sum), num),
        "training/rollout_probs_diff_max": Max(float(sums.abs_prob_diff_max)),
        "training/rollout_kl_k3": Mean(float(sums.k3_kl_sum), num),
    }


def _bounds_metrics(bounds: ClipBounds | None) -> dict[str, Metric]:
    if bounds is None:
        return {}
    low, high, share, initial = torch.stack(
        [bounds.low, bounds.high, bounds.positive_share, bounds.initial_positive_share]
    ).tolist()
    defined = 0.0 if bounds.outcome == "no_signal" else 1.0
    return {
        "actor/bapo_clip_low": Mean(low, 1.0),
        "actor/bapo_clip_high": Mean(high, 1.0),
        "actor/bapo_positive_share": Mean(share if defined else 0.0, defined),
        "actor/bapo_initial_positive_share": Mean(initial if defined else 0.0, defined),
        **{f"actor/bapo_outcome/{name}": Mean(float(bounds.outcome == name), 1.0) for name in OUTCOMES},
    }


def _step_metrics(step: StepResult, lr: float) -> dict[str, Metric]:
    return {
        "actor/grad_norm": Mean(step.grad_norm, 1.0),
        "actor/grad_norm_max": Max(step.grad_norm),
        "actor/skipped_updates": Mean(float(step.skipped), 1.0),
        "actor/lr": Last(lr),
    }


def reduce_metrics(metrics: dict[str, Metric], groups: ParallelGroups) -> dict[str, Metric]:
    """Reduce over data- and context-parallel ranks on the last pipeline stage, whose result every stage then gets."""
    if groups.is_last_stage:
        sums, maxima = (torch.from_numpy(v).to(local_device()) for v in to_vectors(metrics))
        sum_over(groups.data_context)(sums)
        max_over(groups.data_context)(maxima)
        metrics = from_vectors(metrics, sums.cpu().numpy(), maxima.cpu().numpy())
    return broadcast_object_from_last_stage(metrics, groups)
