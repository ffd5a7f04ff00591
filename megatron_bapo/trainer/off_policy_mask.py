"""Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, Section 3.1): bad responses that the policy has left.

Legend: N response tokens of a micro-batch on this rank.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_bapo.algorithm.objectives import sequence_log_ratios
from megatron_bapo.parallel.collectives import sum_over
from megatron_bapo.trainer.micro_batches import MicroBatch
from megatron_bapo.trainer.worker import Worker


def off_policy_mask(worker: Worker, micro_batch: MicroBatch, log_probs_N: Tensor) -> Tensor | None:
    """Return which tokens are masked, as booleans [N]; None without a threshold.

    A response is masked if its advantage is negative and the mean over its tokens of log p_rollout - log p exceeds
    `off_policy_mask_threshold`, where p_rollout is the policy of the engines, whatever the denominator of the ratios.
    This is a collective of the context-parallel ranks.
    """
    threshold = worker.config.algorithm.off_policy_mask_threshold
    if threshold is None:
        return None
    log_ratio_N = log_probs_N - micro_batch.rollout_log_probs_N
    counted_N = (micro_batch.weights_N != 0) & (micro_batch.corrections_N != 0)
    sequence_log_ratio_N = sequence_log_ratios(
        log_ratio_N,
        counted_N & ~log_ratio_N.isnan(),
        micro_batch.sequence_index_N,
        micro_batch.num_sequences,
        sum_over(worker.groups.context),
    )
    return counted_N & (micro_batch.advantages_N < 0) & (sequence_log_ratio_N < -threshold)


def without_masked(micro_batch: MicroBatch, masked_N: Tensor | None) -> MicroBatch:
    """Set the advantages of masked tokens to 0, so that the objectives and BAPO's bounds leave them out."""
    if masked_N is None:
        return micro_batch
    return replace(micro_batch, advantages_N=micro_batch.advantages_N.masked_fill(masked_N, 0.0))
