"""What the trainer makes of a rollout batch before its updates: additional log-probs, rewards, advantages, weights.

Legend: T sampled tokens of all trajectories, one after another; G groups, N trajectories per group; B trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_bapo.algorithm.advantages import estimate_advantages, overlong_penalty
from megatron_bapo.algorithm.kl import kl_estimate
from megatron_bapo.algorithm.policy_loss import token_weights
from megatron_bapo.algorithm.rollout_correction import RolloutCorrection, rollout_correction
from megatron_bapo.config.algorithm import LossAggMode
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import Max, Mean, Metric
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.utilization import scoring_flops
from megatron_bapo.trainer.worker import Worker, score_trajectories


def make_examples(
    worker: Worker, reference: PolicyModel | None, trajectories: Sequence[Trajectory]
) -> tuple[list[Example], dict[str, Metric]]:
    """An example for each trajectory, still of weight 0, and the whole batch's metrics; the same on every rank.

    But for tokens that a rank does not train on (`share_out`). The trajectories of a group stand side by side.
    `reference` is the frozen policy where a KL coefficient asks for one. Collective.
    """
    algorithm, temperature = worker.config.algorithm, worker.config.rollout.temperature
    nothing: list[None] = [None] * len(trajectories)
    proximal = references = corrections = nothing
    num_passes = 0
    metrics: dict[str, Metric] = {}
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
        metrics |= correction_metrics(correction)
    advantages, found = _advantages(worker.config, examples)
    examples = [
        replace(example, advantage=advantage, correction_weights=correction)
        for example, advantage, correction in zip(examples, advantages, corrections, strict=True)
    ]
    return examples, metrics | found | scoring_flops(worker, examples, num_passes)


def weighted(examples: Sequence[Example], mode: LossAggMode, max_response_length: int) -> list[Example]:
    """The examples of a minibatch with weights that carry its global denominator.

    As in verl, whose rejection takes tokens out of the response mask, rejected ones count in no number of tokens, and
    trajectories without any other still count as trajectories.
    """
    lengths = torch.tensor([example.num_learned for example in examples])
    weights = token_weights(
        mode,
        lengths,
        num_trajectories=len(examples),
        num_tokens=int(lengths.sum()),
        max_response_length=max_response_length,
    )
    return [replace(example, weight=weight) for example, weight in zip(examples, weights.tolist(), strict=True)]


def minibatches(config: Config, trajectories: Sequence[Trajectory], step: int) -> list[list[int]]:
    """Which trajectories each update after `step` steps learns from: a pass over all, then others in an order by lot.

    `overlong.mode=filter` leaves truncated answers out.
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


def laid_out_together(config: Config, trajectories: Sequence[Trajectory], step: int) -> list[list[int]]:
    """The trajectories of each split into micro-batches: those of the updates, and all where they are scored before."""
    scored = config.algorithm.behaviour_policy == "recomputed" or config.algorithm.needs_reference
    return minibatches(config, trajectories, step) + [list(range(len(trajectories)))] * scored


def minibatch(config: Config, examples: Sequence[Example]) -> list[Example]:
    """The examples that an update learns from, weighted; empty where there is no token to learn from."""
    if not any(example.num_learned for example in examples):
        return []
    return weighted(examples, config.algorithm.loss_agg_mode, config.rollout.max_response_length)


def correction_metrics(correction: RolloutCorrection) -> dict[str, Metric]:
    """In verl's names."""
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


def _advantages(config: Config, examples: Sequence[Example]) -> tuple[list[np.ndarray], dict[str, Metric]]:
    """Advantages of every token, and metrics in verl's names: critic/rewards is the score after all penalties."""
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
        current_T, reference_T = (
            _cat([example.ratio_log_probs for example in examples]),
            _cat([example.reference_log_probs for example in examples]),
        )
        kl_T = kl_estimate(algorithm.kl_reward_type, current_T, reference_T)
        penalties_T = algorithm.kl_reward_coef * kl_T
        total -= penalties_T.sum().item()
        metrics["actor/reward_kl_penalty"] = Mean(kl_T.sum().item(), len(kl_T))
    advantages_T = estimate_advantages(
        algorithm.adv_estimator, rewards_GN, num_sampled_GN, penalties_T, norm_by_std=algorithm.norm_adv_by_std
    )
    metrics |= {
        "critic/rewards/mean": Mean(total, num),
        "critic/advantages/mean": Mean(advantages_T.sum().item(), len(advantages_T)),
        "critic/advantages/max": Max(advantages_T.max().item()),
    }
    return _split(advantages_T, trajectories), metrics


def _cat(values: Sequence[np.ndarray | None]) -> torch.Tensor:
    """[T] float64."""
    assert all(value is not None for value in values), "every trajectory has been scored"
    return torch.from_numpy(np.concatenate([np.asarray(value, np.float64) for value in values]))


def _split(values_T: torch.Tensor, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """[S] for each trajectory."""
    lengths = [trajectory.num_sampled for trajectory in trajectories]
    return np.split(values_T.numpy(), np.cumsum(lengths)[:-1])
