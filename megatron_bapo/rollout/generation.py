"""From prompts to scored groups over any number of engines."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from megatron_bapo.errors import RunError
from megatron_bapo.records import Group, Trajectory, VersionSpan
from megatron_bapo.rewards.scorer import RewardRequest, Scorer
from megatron_bapo.rollout.messages import Generated, GenerationRequest
from megatron_bapo.rollout.tokenization import TokenizedPrompt

GenerateMany = Callable[[list[GenerationRequest]], Awaitable[list[Generated]]]
"""One engine: a batch of requests to their answers, in order."""


@dataclass(frozen=True)
class Sampling:
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_response_length: int
    seed: int
    """Of this batch; every prompt's own seed is derived from it and the prompt's id."""


@dataclass(frozen=True)
class ScoredGroups:
    groups: list[Group]
    num_reward_timeouts: int


async def generate_groups(
    engines: Sequence[GenerateMany], prompts: Sequence[TokenizedPrompt], sampling: Sampling
) -> list[Group]:
    """Sample `n` answers to each prompt; prompts are dealt to the engines in turn. Rewards are still NaN."""
    requests = [_request(prompt, index, sampling) for index, prompt in enumerate(prompts)]
    shares = [requests[i :: len(engines)] for i in range(len(engines))]
    answers = await asyncio.gather(*(engine(share) for engine, share in zip(engines, shares, strict=True) if share))
    return [
        _group(prompt, answers[index % len(engines)][index // len(engines)]) for index, prompt in enumerate(prompts)
    ]


def score_groups(groups: Sequence[Group], scorer: Scorer) -> ScoredGroups:
    """The same groups with rewards."""
    requests = [
        RewardRequest(
            prompt_id=group.prompt.prompt_id,
            data_source=group.prompt.data_source,
            solution_str=trajectory.text,
            ground_truth=group.prompt.ground_truth,
            extra_info=group.prompt.extra_info,
        )
        for group in groups
        for trajectory in group.trajectories
    ]
    results = iter(scorer.score(requests))
    num_timeouts = 0
    scored = []
    for group in groups:
        trajectories = []
        for trajectory in group.trajectories:
            result = next(results)
            num_timeouts += result.timed_out
            trajectories.append(replace(trajectory, reward=result.reward))
        scored.append(Group(group.prompt, tuple(trajectories)))
    return ScoredGroups(scored, num_timeouts)


def _request(prompt: TokenizedPrompt, index: int, sampling: Sampling) -> GenerationRequest:
    identity = f"{sampling.seed}:{index}:{prompt.prompt.prompt_id}"
    return GenerationRequest(
        request_id=identity,
        prompt_token_ids=prompt.token_ids,
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_response_length,
        seed=int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=4).digest()) >> 1,
    )


def _group(prompt: TokenizedPrompt, generated: Generated) -> Group:
    if any(len(completion.token_ids) == 0 for completion in generated.completions):
        raise RunError(f"an engine answered prompt {prompt.prompt.prompt_id} without a single token")
    return Group(
        prompt.prompt,
        tuple(
            Trajectory(
                prompt_token_ids=prompt.token_ids,
                response_token_ids=completion.token_ids,
                behaviour_log_probs=completion.log_probs,
                version_spans=(VersionSpan(generated.policy_version, len(completion.token_ids)),),
                finish_reason=completion.finish_reason,
                text=completion.text,
            )
            for completion in generated.completions
        ),
    )
