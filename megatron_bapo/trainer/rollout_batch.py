"""Preparation of a rollout batch for its updates: additional log-probs, shaped rewards, advantages and loss weights.

Legend: T sampled tokens of all trajectories, concatenated; G groups, N trajectories per group; B trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_bapo.algorithm.advantages import NORMALIZED_OVER_TOKENS, estimate_advantages, overlong_penalty
from megatron_bapo.algorithm.kl import kl_estimate
from megatron_bapo.algorithm.policy_loss import token_weights
from megatron_bapo.algorithm.rollout_correction import RolloutCorrection, rollout_correction
from megatron_bapo.config.algorithm import KlType, LossAggMode
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import Max, Mean, Metric, Sum
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.utilization import scoring_flops
from megatron_bapo.trainer.worker import Worker, score_trajectories


def make_examples(
    worker: Worker, reference: PolicyModel | None, trajectories: Sequence[Trajectory]
) -> tuple[list[Example], dict[str, Metric]]:
    """Return one example per trajectory, with weight 0 for now, and the metrics of the whole batch.

    The result is the same on every rank, except for tokens that a rank does not train on (`scatter_batch`). The
    trajectories of a group must be adjacent. `reference` is the reference model if a KL coefficient needs one.
    Collective.
    """
    algorithm, temperature = worker.config.algorithm, worker.config.rollout.temperature
    missing: list[None] = [None] * len(trajectories)
    proximal = references = corrections = missing
    num_passes = 0
    metrics: dict[str, Metric] = {}
    accepted_T = None
    if algorithm.behaviour_policy == "recomputed":
        proximal = score_trajectories(worker, trajectories, temperature)
        num_passes += 1
    if reference is not None:
        references = score_trajectories(worker, trajectories, temperature, reference)
        num_passes += 1
    examples = [
        Example(trajectory, 0.0, 0.0, proximal_log_probs=own, reference_log_probs=frozen)
        for trajectory, own, frozen in zip(trajectories, proximal, references, strict=True)
    ]
    if algorithm.rollout_correction.active:
        correction = _correction(worker.config, examples)
        corrections = _split(correction.weights_T, trajectories)
        accepted_T = correction.weights_T != 0
        metrics |= correction_metrics(correction)
    advantages, found = _advantages(worker.config, examples, accepted_T)
    examples = [
        replace(example, advantage=advantage, correction_weights=correction)
        for example, advantage, correction in zip(examples, advantages, corrections, strict=True)
    ]
    return examples, metrics | found | scoring_flops(worker, examples, num_passes)


def with_token_weights(examples: Sequence[Example], mode: LossAggMode, max_response_length: int) -> list[Example]:
    """Return the examples of a minibatch with loss weights, which normalize the loss over the global minibatch.

    As in verl, where rejection removes tokens from the response mask, rejected tokens do not count as tokens, and
    trajectories whose tokens are all rejected still count as trajectories.
    """
    lengths = torch.tensor([example.num_trained_tokens for example in examples])
    weights = token_weights(
        mode,
        lengths,
        num_trajectories=len(examples),
        num_tokens=int(lengths.sum()),
        max_response_length=max_response_length,
    )
    return [replace(example, weight=weight) for example, weight in zip(examples, weights.tolist(), strict=True)]


def minibatches(config: Config, trajectories: Sequence[Trajectory], step: int) -> list[list[int]]:
    """Return the trajectory indices of each update after `step` steps: one pass in order, later passes shuffled.

    `overlong.mode=filter` excludes truncated responses.
    """
    size, updates = config.trainer.ppo_mini_batch_size, list[list[int]]()
    learned = [t.finish_reason != "length" or config.algorithm.overlong.mode != "filter" for t in trajectories]
    for epoch in range(config.trainer.ppo_epochs):
        order = np.arange(len(trajectories))
        if epoch:
            order = np.random.default_rng([config.seed, step, epoch]).permutation(order)
        chosen = order.tolist()
        updates += [[i for i in chosen[start : start + size] if learned[i]] for start in range(0, len(chosen), size)]
    return updates


def packed_together(config: Config, trajectories: Sequence[Trajectory], step: int) -> list[list[int]]:
    """Return the sets of trajectory indices that are packed together into micro-batches.

    There is one set per update, and one of all trajectories if they are scored before the updates.
    """
    scored = config.algorithm.behaviour_policy == "recomputed" or config.algorithm.needs_reference
    return minibatches(config, trajectories, step) + [list(range(len(trajectories)))] * scored


def minibatch(config: Config, examples: Sequence[Example]) -> list[Example]:
    """Return the weighted examples of an update, or an empty list if no token is left to train on."""
    if not any(example.num_trained_tokens for example in examples):
        return []
    return with_token_weights(examples, config.algorithm.loss_agg_mode, config.rollout.max_response_length)


def correction_metrics(correction: RolloutCorrection) -> dict[str, Metric]:
    """Return the metrics of rollout correction under verl's names."""
    return {
        "rollout_corr/rollout_is_mean": Mean(correction.mean_weight.item(), 1.0),
        "rollout_corr/rollout_is_ratio_fraction_high": Mean(correction.truncated_fraction.item(), 1.0),
        "rollout_corr/rollout_rs_masked_fraction": Mean(correction.rejected_fraction.item(), 1.0),
        "rollout_corr/rollout_rs_seq_masked_fraction": Mean(correction.rejected_sequence_fraction.item(), 1.0),
    }


def _correction(config: Config, examples: Sequence[Example]) -> RolloutCorrection:
    proximal_T = _cat([example.ratio_log_probs for example in examples])
    rollout_T = _cat([example.trajectory.behaviour_log_probs for example in examples])
    lengths_B = torch.tensor([example.trajectory.num_sampled for example in examples])
    return rollout_correction(proximal_T, rollout_T, lengths_B, config.algorithm.rollout_correction)


def _advantages(
    config: Config, examples: Sequence[Example], accepted_T: torch.Tensor | None
) -> tuple[list[float] | list[np.ndarray], dict[str, Metric]]:
    """Return the advantage of each trajectory, or of its tokens, and metrics under verl's names.

    critic/rewards includes all penalties.
    """
    algorithm, overlong = config.algorithm, config.algorithm.overlong
    trajectories = [example.trajectory for example in examples]
    num_sampled_GN = torch.tensor([t.num_sampled for t in trajectories]).view(-1, config.rollout.n)
    rewards_GN = torch.tensor([t.reward for t in trajectories], dtype=torch.float64).view_as(num_sampled_GN)
    if overlong.buffer_length is not None:
        limit = config.rollout.max_response_length
        lengths_GN = torch.tensor([len(t.response_token_ids) for t in trajectories]).view_as(num_sampled_GN)
        rewards_GN = rewards_GN + overlong_penalty(lengths_GN, limit, overlong.buffer_length, overlong.penalty_factor)
    total, num, metrics = rewards_GN.sum().item(), len(examples), {}
    penalties_T = None
    if algorithm.kl_reward_coef:
        kl_T, num_dropped = _reward_kl(algorithm.kl_reward_type, examples)
        penalties_T = algorithm.kl_reward_coef * kl_T
        total -= penalties_T.sum().item()
        metrics["actor/reward_kl_penalty"] = Mean(kl_T.sum().item(), len(kl_T) - num_dropped)
        metrics["actor/reward_kl_dropped_tokens"] = Sum(num_dropped)
    advantages = estimate_advantages(
        algorithm.adv_estimator,
        rewards_GN,
        num_sampled_GN,
        penalties_T,
        norm_by_std=algorithm.norm_adv_by_std,
        accepted_T=accepted_T,
    )
    over_tokens = algorithm.adv_estimator in NORMALIZED_OVER_TOKENS
    num_tokens_B = num_sampled_GN.flatten()
    token_sum = advantages.sum() if over_tokens else (advantages * num_tokens_B).sum()
    metrics |= {
        "critic/rewards/mean": Mean(total, num),
        "critic/advantages/mean": Mean(token_sum.item(), int(num_tokens_B.sum())),
        "critic/advantages/max": Max(advantages.max().item()),
    }
    return _split(advantages, trajectories) if over_tokens else advantages.tolist(), metrics


def _reward_kl(kind: KlType, examples: Sequence[Example]) -> tuple[torch.Tensor, int]:
    """Return the KL estimate of every token, and the number of tokens without one.

    A token with a log-prob that is not finite gets 0: its penalty would reach its group, or the whole batch.
    """
    current_T = _cat([example.ratio_log_probs for example in examples])
    reference_T = _cat([example.reference_log_probs for example in examples])
    dropped_T = ~(current_T.isfinite() & reference_T.isfinite())
    return kl_estimate(kind, current_T, reference_T).masked_fill(dropped_T, 0.0), int(dropped_T.sum())


def _cat(values: Sequence[np.ndarray | None]) -> torch.Tensor:
    """Concatenate arrays of the trajectories to a tensor, float64 [T]."""
    assert all(value is not None for value in values), "every trajectory must have been scored"
    return torch.from_numpy(np.concatenate([np.asarray(value, np.float64) for value in values]))


def _split(values_T: torch.Tensor, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """Split values [T] into one array [S] per trajectory."""
    lengths = [trajectory.num_sampled for trajectory in trajectories]
    return np.split(values_T.numpy(), np.cumsum(lengths)[:-1])
