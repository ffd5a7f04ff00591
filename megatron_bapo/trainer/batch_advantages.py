"""Advantages of a rollout batch, of which a rank has the tokens that it trains on.

Legend: T sampled tokens of the trajectories whose tokens a rank has, concatenated; G groups, N trajectories per group;
B trajectories; S sampled tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_bapo.algorithm.advantages import estimate_advantages, overlong_penalty, token_returns, whiten
from megatron_bapo.algorithm.kl import kl_estimate
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.values import Max, Mean, Metric, Sum
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.trajectory_values import (
    concatenated,
    indices_with_tokens,
    on_every_rank,
    on_main_rank,
    split_by_trajectory,
    token_sums,
)
from megatron_bapo.trainer.worker import Worker


def with_advantages(worker: Worker, examples: Sequence[Example]) -> tuple[list[Example], dict[str, Metric]]:
    """Return the examples with the advantage of each trajectory, or of its tokens, and metrics under verl's names.

    critic/rewards includes all penalties. With `objective=distill` rewards are only reported, and advantages are 0.
    """
    algorithm, trajectories = worker.config.algorithm, [example.trajectory for example in examples]
    rewards_GN, num_sampled_GN = shaped_rewards(worker.config, trajectories)
    total, num, metrics = rewards_GN.sum().item(), len(examples), {}
    if algorithm.objective == "distill":
        return [*examples], {"critic/rewards/mean": Mean(total, num)}
    penalties = None
    if algorithm.kl_reward_coef:
        penalties, kl_sum, num_dropped = _penalties(worker, examples)
        total -= algorithm.kl_reward_coef * kl_sum
        metrics["actor/reward_kl_penalty"] = Mean(kl_sum, int(num_sampled_GN.sum()) - num_dropped)
        metrics["actor/reward_kl_dropped_tokens"] = Sum(num_dropped)
    metrics["critic/rewards/mean"] = Mean(total, num)
    if algorithm.has_token_advantages:
        assert penalties is not None, "they are what tokens have advantages of their own for"
        found, of_advantages = _with_token_advantages(worker, examples, rewards_GN.flatten(), penalties)
        return found, metrics | of_advantages
    num_accepted = torch.tensor([each.num_trained_tokens for each in examples])
    advantages = estimate_advantages(algorithm, rewards_GN, num_sampled_GN, penalties, num_accepted=num_accepted)
    metrics |= {
        "critic/advantages/mean": Mean((advantages * num_accepted).sum().item(), num_accepted.sum().item()),
        "critic/advantages/max": Max(advantages.max().item()),
    }
    return [replace(e, advantage=each) for e, each in zip(examples, advantages.tolist(), strict=True)], metrics


def _with_token_advantages(
    worker: Worker, examples: Sequence[Example], rewards_B: torch.Tensor, penalties_T: torch.Tensor
) -> tuple[list[Example], dict[str, Metric]]:
    """Return the examples with advantages of their tokens, normalized over the whole batch, and metrics of these."""
    trajectories, groups = [example.trajectory for example in examples], worker.groups
    own = indices_with_tokens(trajectories)
    lengths = [trajectories[i].num_sampled for i in own]
    corrections = [examples[i].correction_weights for i in own]
    weights_T = concatenated(
        [np.ones(num) if each is None else each for num, each in zip(lengths, corrections, strict=True)]
    )
    accepted_T = (weights_T != 0).double()
    advantages_T = whiten(
        token_returns(rewards_B[own], penalties_T, lengths),
        accepted_T,
        total=lambda values_T: token_sums(trajectories, groups, values_T).sum(),
    )
    gains_T = advantages_T * weights_T.nan_to_num()
    found_T = advantages_T * accepted_T, accepted_T, gains_T.clamp(min=0.0), (-gains_T).clamp(min=0.0)
    sums_B4 = token_sums(trajectories, groups, *found_T)
    total, num_accepted, *_ = sums_B4.sum(dim=0).tolist()
    by_trajectory = split_by_trajectory(advantages_T, [trajectories[i] for i in own])
    largest = torch.tensor([each.max() for each in by_trajectory], dtype=torch.float64)
    metrics: dict[str, Metric] = {
        "critic/advantages/mean": Mean(total, num_accepted),
        "critic/advantages/max": Max(on_every_rank(largest[:, None], own, len(examples), groups).max().item()),
    }
    advantages = [np.broadcast_to(np.nan, trajectory.num_sampled) for trajectory in trajectories]
    for index, each in zip(own, by_trajectory, strict=True):
        advantages[index] = each
    return [
        replace(example, advantage=each, token_advantage_sums=(positive, negative))
        for example, each, (*_, positive, negative) in zip(examples, advantages, sums_B4.tolist(), strict=True)
    ], metrics


def advantages_on_main(examples: Sequence[Example], groups: ParallelGroups) -> list[np.ndarray]:
    """Return the advantages [S] of each example's sampled tokens, float64, on the main rank. Collective.

    The result on all other ranks is undefined.
    """
    lengths = [example.trajectory.num_sampled for example in examples]
    by_token = {i: e.advantage for i, e in enumerate(examples) if isinstance(e.advantage, np.ndarray)}
    if not by_token:
        return [np.broadcast_to(e.advantage, length) for e, length in zip(examples, lengths, strict=True)]
    own = indices_with_tokens([example.trajectory for example in examples])
    return on_main_rank({i: by_token[i] for i in own}, lengths, groups)


def shaped_rewards(config: Config, trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
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
    """Return the penalties of a KL term in the reward: as `token_returns` or as `estimate_advantages` takes them.

    Also returns the sum of the KL estimates, and the number of tokens without one: a token with a log-prob that is not
    finite gets 0, because its penalty would reach its group, or the whole batch.
    """
    algorithm = worker.config.algorithm
    own = indices_with_tokens([example.trajectory for example in examples])
    found = [examples[i] for i in own]
    current_T = concatenated([example.ratio_log_probs for example in found])
    reference_T = concatenated([example.reference_log_probs for example in found])
    dropped_T = ~(current_T.isfinite() & reference_T.isfinite())
    kl_T = kl_estimate(algorithm.kl_reward_type, current_T, reference_T).masked_fill(dropped_T, 0.0)
    penalties_T = algorithm.kl_reward_coef * kl_T
    sums_B3 = token_sums([example.trajectory for example in examples], worker.groups, penalties_T, kl_T, dropped_T)
    _, kl_sum, num_dropped = sums_B3.sum(dim=0).tolist()
    penalties = penalties_T if algorithm.has_token_advantages else sums_B3[:, 0]
    return penalties, kl_sum, int(num_dropped)
