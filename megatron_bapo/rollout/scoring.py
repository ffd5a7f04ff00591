"""Score the trajectories of a finished group."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rewards.scorer import RewardRequest, RewardResult, Scorer
from megatron_bapo.rollout.generation import ScoredGroups


async def score_group(group: Group, scorer: Scorer) -> ScoredGroups:
    """Return the group with its rewards; raises the errors of `Scorer.score`."""
    prompt = group.prompt

    def start_scoring(trajectory: Trajectory) -> asyncio.Task[RewardResult]:
        request = RewardRequest(
            prompt_id=prompt.prompt_id,
            data_source=prompt.data_source,
            solution_str=trajectory.final_text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            prompt=prompt.messages,
            turns=trajectory.messages,
            finish_reason=trajectory.finish_reason,
        )
        return tasks.create_task(scorer.score(request))

    try:
        async with asyncio.TaskGroup() as tasks:
            scores = [start_scoring(trajectory) for trajectory in group.trajectories]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    results = [score.result() for score in scores]
    trajectories = (
        replace(t, reward=r.reward, answer=r.answer) for t, r in zip(group.trajectories, results, strict=True)
    )
    return ScoredGroups([Group(prompt, tuple(trajectories))], sum(result.timed_out for result in results))
