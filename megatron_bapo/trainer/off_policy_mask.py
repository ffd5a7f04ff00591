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


def without_off_policy(worker: Worker, micro_batch: MicroBatch, log_probs_N: Tensor) -> MicroBatch:
    """Set the negative advantages of masked responses to 0, so that the objective and BAPO's bounds leave them out.

    A response is masked if the mean over its tokens of log p_rollout - log p exceeds `off_policy_mask_threshold`, where
    p_rollout is the policy of the engines, whatever the denominator of the ratios. Without a threshold nothing is
    masked. This is a collective of the context-parallel ranks.
    """
    threshold = worker.config.algorithm.off_policy_mask_threshold
    if threshold is None:
        return micro_batch
    log_ratio_N = log_probs_N - micro_batch.rollout_log_probs_N
    counted_N = (micro_batch.weights_N != 0) & (micro_batch.corrections_N != 0)
    sequence_log_ratio_N = sequence_log_ratios(
        log_ratio_N,
        counted_N & ~log_ratio_N.isnan(),
        micro_batch.sequence_index_N,
        micro_batch.num_sequences,
        sum_over(worker.groups.context),
    )
    masked_N = counted_N & (micro_batch.advantages_N < 0) & (sequence_log_ratio_N < -threshold)
    return replace(micro_batch, advantages_N=micro_batch.advantages_N.masked_fill(masked_N, 0.0))
