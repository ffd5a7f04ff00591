"""The clip bounds of one minibatch, found before its update.

Legend: N response tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_bapo.algorithm.clip_bounds import ClipBounds, find_clip_bounds
from megatron_bapo.parallel.collectives import sum_over
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.trainer.micro_batches import MicroBatch
from megatron_bapo.trainer.worker import Worker, score


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
    # What the loss weights, the contributions weight as well; rejected tokens have none.
    corrected = algorithm.rollout_correction.active
    weights_N = torch.cat([m.corrections_N for m in micro_batches]) if corrected else None
    return find_clip_bounds(
        log_ratio_N, advantages_N, algorithm.clip_bounds, weights=weights_N, reduce=sum_over(groups.data_context)
    )


def limits(worker: Worker, bounds: ClipBounds | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The 0-d clip bounds of the loss."""
    if bounds is not None:
        return bounds.low.float(), bounds.high.float()
    algorithm = worker.config.algorithm
    low, high = 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high
    return torch.tensor(low, device=local_device()), torch.tensor(high, device=local_device())
