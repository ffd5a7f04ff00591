"""Preparation of a rollout batch for its updates: additional log-probs, shaped rewards, advantages and loss weights.

Legend: T sampled tokens of all trajectories, concatenated; G groups, N trajectories per group; B trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_bapo.algorithm.advantages import estimate_advantages, overlong_penalty, positive_factor
from megatron_bapo.algorithm.kl import kl_estimate
from megatron_bapo.algorithm.policy_loss import token_weights
from megatron_bapo.algorithm.rollout_correction import rollout_correction
from megatron_bapo.config.algorithm import LossAggMode
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import Max, Mean, Metric, Sum
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.recorded_routes import score_and_record
from megatron_bapo.trainer.trajectory_sums import indices_with_tokens, on_every_rank
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
    advantages, found = _advantages(worker, examples)
    examples = [replace(example, advantage=each) for example, each in zip(examples, advantages, strict=True)]
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
        algorithm, (rewards_GN, num_sampled_GN) = config.algorithm, _shaped_rewards(config, trajectories)
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
    sums = [_advantage_sums(example) for example in examples]
    factor = positive_factor(sum(p for p, _ in sums), sum(n for _, n in sums), min_share)
    return [replace(example, advantage=_scaled(example.advantage, factor)) for example in examples]


def _advantage_sums(example: Example) -> tuple[float, float]:
    """Return the sums of w c |A| over the tokens with A > 0 and with A < 0, where c is the rollout correction."""
    if isinstance(example.advantage, np.ndarray):
        gains = example.advantage
        if example.correction_weights is not None:
            gains = gains * np.nan_to_num(example.correction_weights)
    else:
        gains = np.array([example.advantage * example.num_corrected_tokens])
    return example.weight * float(gains.clip(min=0.0).sum()), example.weight * float((-gains).clip(min=0.0).sum())


def _scaled(advantage: float | np.ndarray, factor: float) -> float | np.ndarray:
    if isinstance(advantage, np.ndarray):
        return np.where(advantage > 0.0, factor * advantage, advantage)
    return factor * advantage if advantage > 0.0 else advantage


def _corrected(worker: Worker, examples: Sequence[Example]) -> tuple[list[Example], torch.Tensor]:
    """Return the examples with the correction weights of those with tokens, and `RolloutCorrection.sums_B4` of all."""
    own = indices_with_tokens([example.trajectory for example in examples])
    found = [examples[i] for i in own]
    correction = rollout_correction(
        _cat([example.ratio_log_probs for example in found]),
        _cat([example.trajectory.behaviour_log_probs for example in found]),
        torch.tensor([example.trajectory.num_sampled for example in found], dtype=torch.int64),
        worker.config.algorithm.rollout_correction,
    )
    weights = dict(zip(own, _split(correction.weights_T, [example.trajectory for example in found]), strict=True))
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


def _advantages(
    worker: Worker, examples: Sequence[Example]
) -> tuple[list[float] | list[np.ndarray], dict[str, Metric]]:
    """Return the advantage of each trajectory, or of its tokens, and metrics under verl's names.

    critic/rewards includes all penalties. With `objective=distill` rewards are only reported, and advantages are 0.
    """
    algorithm, trajectories = worker.config.algorithm, [example.trajectory for example in examples]
    rewards_GN, num_sampled_GN = _shaped_rewards(worker.config, trajectories)
    total, num, metrics = rewards_GN.sum().item(), len(examples), {}
    if algorithm.objective == "distill":
        return [0.0] * num, {"critic/rewards/mean": Mean(total, num)}
    num_tokens_B, penalties = num_sampled_GN.flatten(), None
    if algorithm.kl_reward_coef:
        penalties, kl_sum, num_dropped = _penalties(worker, examples)
        total -= algorithm.kl_reward_coef * kl_sum
        metrics["actor/reward_kl_penalty"] = Mean(kl_sum, int(num_tokens_B.sum()) - num_dropped)
        metrics["actor/reward_kl_dropped_tokens"] = Sum(num_dropped)
    by_token = algorithm.has_token_advantages
    num_accepted = _accepted(examples) if by_token else torch.tensor([each.num_trained_tokens for each in examples])
    advantages = estimate_advantages(algorithm, rewards_GN, num_sampled_GN, penalties, num_accepted=num_accepted)
    metrics |= {
        "critic/rewards/mean": Mean(total, num),
        "critic/advantages/mean": Mean((advantages * num_accepted).sum().item(), num_accepted.sum().item()),
        "critic/advantages/max": Max(advantages.max().item()),
    }
    return _split(advantages, trajectories) if by_token else advantages.tolist(), metrics


def _accepted(examples: Sequence[Example]) -> torch.Tensor:
    """Return 1 for each token that rollout correction accepts and 0 for the others, float64 [T]."""
    return _cat(
        [
            np.ones(each.trajectory.num_sampled) if each.correction_weights is None else each.correction_weights != 0
            for each in examples
        ]
    )


def _shaped_rewards(config: Config, trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards with the penalty of overlong responses, float64 [G, N], and numbers of sampled tokens, [G, N]."""
    overlong = config.algorithm.overlong
    num_sampled_GN = torch.tensor([t.num_sampled for t in trajectories]).view(-1, config.rollout.n)
    rewards_GN = torch.tensor([t.reward for t in trajectories], dtype=torch.float64).view_as(num_sampled_GN)
    if overlong.buffer_length is None:
        return rewards_GN, num_sampled_GN
    limit = config.rollout.max_response_length
    lengths_GN = torch.tensor([len(t.response_token_ids) for t in trajectories]).view_as(num_sampled_GN)
    penalties_GN = overlong_penalty(lengths_GN, limit, overlong.buffer_length, overlong.penalty_factor)
    return rewards_GN + penalties_GN, num_sampled_GN


def _penalties(worker: Worker, examples: Sequence[Example]) -> tuple[torch.Tensor, float, int]:
    """Return the penalties of a KL term in the reward, as `estimate_advantages` takes them.

    Also returns the sum of the KL estimates, and the number of tokens without one: a token with a log-prob that is not
    finite gets 0, because its penalty would reach its group, or the whole batch.
    """
    algorithm = worker.config.algorithm
    own = indices_with_tokens([example.trajectory for example in examples])
    found = [examples[i] for i in own]
    current_T = _cat([example.ratio_log_probs for example in found])
    reference_T = _cat([example.reference_log_probs for example in found])
    dropped_T = ~(current_T.isfinite() & reference_T.isfinite())
    kl_T = kl_estimate(algorithm.kl_reward_type, current_T, reference_T).masked_fill(dropped_T, 0.0)
    penalties_T = algorithm.kl_reward_coef * kl_T
    lengths = [example.trajectory.num_sampled for example in found]
    by_trajectory = zip(penalties_T.split(lengths), kl_T.split(lengths), dropped_T.split(lengths), strict=True)
    sums = [[part.sum().item() for part in parts] for parts in by_trajectory]
    sums_B3 = on_every_rank(torch.tensor(sums, dtype=torch.float64).view(-1, 3), own, len(examples), worker.groups)
    _, kl_sum, num_dropped = sums_B3.sum(dim=0).tolist()
    penalties = penalties_T if algorithm.has_token_advantages else sums_B3[:, 0]
    return penalties, kl_sum, int(num_dropped)


def _cat(values: Sequence[np.ndarray | None]) -> torch.Tensor:
    """Concatenate arrays of the trajectories, of which a rank may have none, to a tensor, float64 [T]."""
    assert all(value is not None for value in values), "every trajectory must have been scored"
    return torch.from_numpy(np.concatenate([np.zeros(0), *(np.asarray(value, np.float64) for value in values)]))


def _split(values_T: torch.Tensor, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """Split values [T] into one array [S] per trajectory."""
    lengths = [trajectory.num_sampled for trajectory in trajectories]
    return np.split(values_T.numpy(), np.cumsum(lengths))[:-1]
