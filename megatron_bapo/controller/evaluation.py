"""Held-out accuracy and batch statistics from scored groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megatron_bapo.metrics.sinks import SampleRow
from megatron_bapo.metrics.values import Max, Mean, Metric, Sum
from megatron_bapo.records import SOLVED, Group, Trajectory
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.uniform_groups import is_uniform


def validation_metrics(scored: ScoredGroups, n: int) -> dict[str, Metric]:
    """Return mean@n and best@n over all held-out prompts, and by data source if there are several.

    The metric names are verl's. Both metrics count solved responses; `score/mean@n` is the mean of the scores.
    """
    by_source: dict[str, list[Group]] = defaultdict(list)
    for group in scored.groups:
        by_source[group.prompt.data_source].append(group)
    trajectories = [t for group in scored.groups for t in group.trajectories]
    metrics = _accuracy("val", scored.groups, n) | _turn_metrics(trajectories)
    metrics[f"val/score/mean@{n}"] = Mean(sum(t.reward for t in trajectories), len(trajectories))
    if len(by_source) > 1:
        for source, groups in by_source.items():
            metrics |= _accuracy(f"val/{source}", groups, n)
    return metrics


def rollout_metrics(scored: ScoredGroups) -> dict[str, Metric]:
    """Return metrics of one rollout batch: rewards, response lengths and groups whose rewards are all equal."""
    trajectories = [t for group in scored.groups for t in group.trajectories]
    rewards = [t.reward for t in trajectories]
    lengths = [len(t.response_token_ids) for t in trajectories]
    num = len(trajectories)
    uniform = sum(map(is_uniform, scored.groups))
    return {
        "critic/score/mean": Mean(sum(rewards), num),
        "critic/score/max": Max(max(rewards)),
        "response_length/mean": Mean(sum(lengths), num),
        "response_length/max": Max(max(lengths)),
        "response_length/clip_ratio": Mean(sum(t.finish_reason == "length" for t in trajectories), num),
        "training/uniform_groups": Mean(uniform, len(scored.groups)),
        "training/reward_timeouts": Sum(scored.num_reward_timeouts),
        "perf/total_num_tokens": Sum(sum(lengths) + sum(len(t.prompt_token_ids) for t in trajectories)),
        **_turn_metrics(trajectories),
        **_kept_token_metrics(trajectories),
    }


def _kept_token_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    """Return the mean number of tokens that a token was sampled from, if the engines have returned them."""
    kept = [(t.kept_tokens, t.num_sampled) for t in trajectories if t.kept_tokens is not None]
    if not kept:
        return {}
    return {"rollout/kept_tokens": Mean(sum(len(tokens) for tokens, _ in kept), sum(num for _, num in kept))}


def samples(groups: Sequence[Group], step: int, num: int) -> list[SampleRow]:
    """Return the first response to each of the first `num` prompts, for the report."""
    return [
        SampleRow(
            step=step,
            prompt="\n".join(message["content"] for message in group.prompt.messages),
            response=_transcript(group.trajectories[0]),
            ground_truth=group.prompt.ground_truth,
            reward=group.trajectories[0].reward,
            finish_reason=group.trajectories[0].finish_reason,
        )
        for group in groups[:num]
    ]


def _transcript(trajectory: Trajectory) -> str:
    """Return the text of a response; if it has several turns, each line names its role."""
    if len(trajectory.messages) == 1:
        return trajectory.text
    return "\n".join(f"{message['role']}: {message['content']}" for message in trajectory.messages)


def _turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Metric]:
    """Return metrics of the policy's turns per trajectory; empty without an environment."""
    num_turns = [sum(message["role"] == "assistant" for message in t.turns) for t in trajectories]
    if not any(num_turns):
        return {}
    return {
        "num_turns/mean": Mean(sum(num_turns), len(num_turns)),
        "num_turns/max": Max(max(num_turns)),
        "num_turns/multi_turn_ratio": Mean(sum(num > 1 for num in num_turns), len(num_turns)),
    }


def _accuracy(prefix: str, groups: Sequence[Group], n: int) -> dict[str, Metric]:
    rewards = [[t.reward for t in group.trajectories] for group in groups]
    num = sum(map(len, rewards))
    return {
        f"{prefix}/mean@{n}": Mean(sum(reward >= SOLVED for r in rewards for reward in r), num),
        f"{prefix}/best@{n}": Mean(sum(max(r) >= SOLVED for r in rewards), len(rewards)),
    }
