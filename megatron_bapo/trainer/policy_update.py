"""One optimizer update from one minibatch: clip bounds first, then the clipped policy gradient.

Legend: T packed tokens of a micro-batch on this rank, N its response tokens, C those of one chunk, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_bapo.algorithm.importance import mismatch_sums
from megatron_bapo.algorithm.policy_loss import policy_loss, supervised_loss
from megatron_bapo.metrics.values import Mean, Metric, from_vectors, merge, to_vectors
from megatron_bapo.model.vocab_parallel import token_loss
from megatron_bapo.parallel.collectives import broadcast_object_from_last_stage, max_over, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.trainer.micro_batches import Example, MicroBatch
from megatron_bapo.trainer.minibatch_bounds import limits, minibatch_bounds
from megatron_bapo.trainer.schedule import run_micro_batches
from megatron_bapo.trainer.token_reservoir import TokenReservoir
from megatron_bapo.trainer.update_metrics import (
    bounds_metrics,
    length_metrics,
    loss_metrics,
    mismatch_metrics,
    step_metrics,
)
from megatron_bapo.trainer.worker import Worker, response_outputs


def update_policy(
    worker: Worker,
    examples: Sequence[Example],
    *,
    lr: float,
    on_policy: bool,
    reservoir: TokenReservoir | None = None,
) -> dict[str, Metric]:
    """One BAPO (or PPO) update; this rank's metrics, empty but on the last pipeline stage.

    `on_policy` says that the examples were sampled from the current weights: every ratio is 1, so the bounds need no
    scoring pass. `reservoir` keeps a sample of the tokens.
    """
    config = worker.config
    if reservoir is not None:
        examples = reservoir.choose(examples)
    micro_batches = worker.micro_batches(examples)
    bounds = minibatch_bounds(worker, micro_batches, on_policy=on_policy)
    low, high = limits(worker, bounds)

    def head(micro_batch: MicroBatch, hidden_TH: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        outputs = response_outputs(worker, micro_batch, hidden_TH)
        behaviour_N, advantages_N, weights_N = (
            micro_batch.behaviour_log_probs_N, micro_batch.advantages_N, micro_batch.weights_N,
        )  # fmt: skip

        def loss_of(log_probs_C: torch.Tensor, _: torch.Tensor, chunk: slice) -> torch.Tensor:
            return policy_loss(log_probs_C, behaviour_N[chunk], advantages_N[chunk], weights_N[chunk], low, high)[0]

        loss, log_probs_N, entropy_N = token_loss(*outputs, loss_of, temperature=config.rollout.temperature)
        _, sums = policy_loss(log_probs_N, behaviour_N, advantages_N, weights_N, low, high)
        metrics = loss_metrics(loss, weights_N, sums, entropy_N, log_probs_N - behaviour_N)
        if reservoir is not None:
            reservoir.add(micro_batch, log_probs_N, entropy_N)
        if on_policy:
            metrics |= mismatch_metrics(mismatch_sums(log_probs_N, behaviour_N))
        return loss, metrics

    return _step(worker, micro_batches, head, lr) | length_metrics(examples) | bounds_metrics(bounds)


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


def _step(
    worker: Worker,
    micro_batches: Sequence[MicroBatch],
    head: Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, dict[str, Metric]]],
    lr: float,
) -> dict[str, Metric]:
    """Forward, backward, optimizer step."""
    worker.optimizer.zero_grad()
    metrics = merge(run_micro_batches(worker.model, micro_batches, head, forward_only=False))
    return metrics | step_metrics(worker.optimizer.step(lr), lr)


def reduce_updates(updates: Sequence[dict[str, Metric]], groups: ParallelGroups) -> list[dict[str, Metric]]:
    """Reduce each update's metrics over data- and context-parallel ranks on the last pipeline stage.

    Every stage gets the result. However many updates there are, two collectives reduce them.
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
    """`reduce_updates` of one update."""
    return reduce_updates([metrics], groups)[0]
