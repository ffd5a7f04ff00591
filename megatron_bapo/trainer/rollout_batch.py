"""Preparation of a rollout batch for its updates: additional log-probs, shaped rewards, advantages and loss weights.

Legend: T sampled tokens of all trajectories, concatenated; G groups, N trajectories per group; B trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_bapo.algorithm.advantages import estimate_advantages, positive_factor
from megatron_bapo.algorithm.policy_loss import token_weights
from megatron_bapo.algorithm.rollout_correction import rollout_correction
from megatron_bapo.config.algorithm import LossAggMode
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import Mean, Metric
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.batch_advantages import shaped_rewards, with_advantages
from megatron_bapo.trainer.batch_header import is_placeholder
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.recorded_routes import score_and_record
from megatron_bapo.trainer.trajectory_values import (
    concatenated,
    indices_with_tokens,
    on_every_rank,
    split_by_trajectory,
)
from megatron_bapo.trainer.utilization import scoring_flops
from megatron_bapo.trainer.worker import Worker, score_trajectories


def make_examples(
    worker: Worker,
    reference: PolicyModel | None,
    trajectories: Sequence[Trajectory],
    teacher: PolicyModel | None = None,
) -> tuple[list[Example], dict[str, Metric]]:
    """Return one example per trajectory, with weight 0 for now, and the metrics of the whole batch.

    The result is the same on every rank, except for tokens that a rank does not train on (`scatter_batch`). The
    trajectories of a group must be adjacent. `reference` is the reference model if a KL coefficient needs one, and
    `teacher` that of `distillation` if the trainer holds it. Collective.
    """
    algorithm, temperature = worker.config.algorithm, worker.config.rollout.temperature
    missing: list[None] = [None] * len(trajectories)
    proximal = references = taught = missing
    routes = [trajectory.routes for trajectory in trajectories]
    groups, num_passes = worker.config.group_numbers(len(trajectories)), 0
    metrics: dict[str, Metric] = {}
    if algorithm.behaviour_policy == "recomputed":
        if algorithm.routing_replay == "trainer":
            proximal, routes = score_and_record(worker, trajectories, temperature)
        else:
            proximal = score_trajectories(worker, trajectories, temperature, groups=groups)
        num_passes += 1
    if reference is not None:
        references = score_trajectories(worker, trajectories, temperature, reference, groups=groups)
        num_passes += 1
    if teacher is not None:
        taught = score_trajectories(worker, trajectories, temperature, teacher, groups=groups)
    elif algorithm.teacher_engines is not None:
        taught = [trajectory.teacher_log_probs for trajectory in trajectories]
        assert all(each is not None for each in taught), "the teacher's engines have scored every trajectory"
    examples = [
        Example(trajectory, 0.0, 0.0, own, frozen, better, routes=experts, group=group)
        for trajectory, own, frozen, better, experts, group in zip(
            trajectories, proximal, references, taught, routes, groups, strict=True
        )
    ]
    if algorithm.rollout_correction.active:
        examples, sums_B4 = _corrected(worker, examples)
        metrics |= _correction_metrics(sums_B4, trajectories)
    examples, found = with_advantages(worker, examples)
    models = [worker.model] * num_passes + ([teacher] if teacher is not None else [])
    return examples, metrics | found | scoring_flops(models, examples)


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
    updates = minibatches(config, trajectories, step)
    if config.trainer.skip_zero_advantage:
        algorithm, (rewards_GN, num_sampled_GN) = config.algorithm, shaped_rewards(config, trajectories)
        found = estimate_advantages(algorithm, rewards_GN, num_sampled_GN, None).tolist()
        updates = [_contributing(update, found, trajectories) for update in updates]
    return updates + [list(range(len(trajectories)))] * config.algorithm.scores_batch


def minibatch(config: Config, examples: Sequence[Example]) -> list[Example]:
    """Return the weighted examples of an update, or an empty list if no token is left to train on.

    With `trainer.skip_zero_advantage` the weights count all examples, but those with advantage 0 are left out.
    """
    if not any(example.num_trained_tokens for example in examples):
        return []
    weighted = with_token_weights(examples, config.algorithm.loss_agg_mode, config.rollout.max_response_length)
    weighted = with_positive_share(weighted, config.algorithm.min_positive_loss_share)
    if not config.trainer.skip_zero_advantage:
        return weighted
    advantages, trajectories = zip(*((example.advantage, example.trajectory) for example in weighted), strict=True)
    return [weighted[i] for i in _contributing(range(len(weighted)), advantages, trajectories)]


def _contributing(
    indices: Sequence[int], advantages: Sequence[float | np.ndarray], trajectories: Sequence[Trajectory]
) -> list[int]:
    """Return those of the trajectories with these indices whose advantage is not 0.

    If there are none, the shortest one stays, because the optimizer moves the weights without a gradient, too.
    """
    contributing = [index for index in indices if np.any(advantages[index])]
    return contributing or sorted(indices, key=lambda index: len(trajectories[index].response_token_ids))[:1]


def with_positive_share(examples: Sequence[Example], min_share: float) -> list[Example]:
    """Return the weighted examples of a minibatch with positive advantages that have `min_share` of the loss or more.

    Tokens count by their rollout correction. All ranks have the advantages of the whole minibatch and the sums of its
    corrections, so that they find one factor.
    """
    if min_share == 0.0:
        return [*examples]
    positive, negative = (sum(e.weight * e.advantage_sums[sign] for e in examples) for sign in (0, 1))
    factor = positive_factor(positive, negative, min_share)
    return [_scaled(example, factor) for example in examples]


def _scaled(example: Example, factor: float) -> Example:
    """Return the example with its positive advantages times `factor`."""
    advantage = example.advantage
    if not isinstance(advantage, np.ndarray):
        return replace(example, advantage=factor * advantage if advantage > 0.0 else advantage)
    positive, negative = example.advantage_sums
    if not is_placeholder(advantage):
        advantage = np.where(advantage > 0.0, factor * advantage, advantage)
    return replace(example, advantage=advantage, token_advantage_sums=(factor * positive, negative))


def _corrected(worker: Worker, examples: Sequence[Example]) -> tuple[list[Example], torch.Tensor]:
    """Return the examples with the correction weights of those with tokens, and `RolloutCorrection.sums_B4` of all."""
    own = indices_with_tokens([example.trajectory for example in examples])
    found = [examples[i] for i in own]
    correction = rollout_correction(
        concatenated([example.ratio_log_probs for example in found]),
        concatenated([example.trajectory.behaviour_log_probs for example in found]),
        torch.tensor([example.trajectory.num_sampled for example in found], dtype=torch.int64),
        worker.config.algorithm.rollout_correction,
    )
    weights = dict(
        zip(own, split_by_trajectory(correction.weights_T, [example.trajectory for example in found]), strict=True)
    )
    sums_B4 = on_every_rank(correction.sums_B4, own, len(examples), worker.groups)
    corrected = [
        replace(
            example,
            correction_weights=weights.get(i),
            num_accepted=example.trajectory.num_sampled - int(num_rejected),
            correction_sum=total,
        )
        for i, (example, (*_, num_rejected, total)) in enumerate(zip(examples, sums_B4.tolist(), strict=True))
    ]
    return corrected, sums_B4


def _correction_metrics(sums_B4: torch.Tensor, trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    """Return the metrics of rollout correction under verl's names."""
    weight, truncated, rejected, _ = sums_B4.sum(dim=0).tolist()
    num = sum(trajectory.num_sampled for trajectory in trajectories)
    return {
        "rollout_corr/rollout_is_mean": Mean(weight, num),
        "rollout_corr/rollout_is_ratio_fraction_high": Mean(truncated, num),
        "rollout_corr/rollout_rs_masked_fraction": Mean(rejected, num),
        "rollout_corr/rollout_rs_seq_masked_fraction": Mean(int(sums_B4[:, 2].count_nonzero()), len(trajectories)),
    }
