"""Generate a prompt's trajectories in segments: each segment is one engine request under one policy version.

A partial trajectory keeps its tokens, log-probs, routes and version spans. The next request sends the prompt and the
partial response as a new prompt to any engine, whatever policy version that engine serves. Partial rollouts, aborted
requests, lost engines and an environment's replies take this path. Sampled tokens are never tokenized again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megatron_bapo.errors import RunError
from megatron_bapo.metrics.values import Metric
from megatron_bapo.records import Group, Prompt
from megatron_bapo.rollout.in_flight_group import Decode, InFlightGroup, PartialTrajectory, Reply, Sampling, text_of
from megatron_bapo.rollout.messages import EngineLost, Generated, GenerationRequest
from megatron_bapo.rollout.quarantine import QuarantinedPrompt
from megatron_bapo.rollout.request_failures import RequestFailures


class Send(Protocol):
    """Sends a request to any engine; returns the engine's name and its completions (`Router.generate`)."""

    def __call__(
        self, request: GenerationRequest, *, prompt_serial: int, prefer: str | None, alone: bool
    ) -> Awaitable[tuple[str, Generated]]: ...


class Environment(Protocol):
    """Replies to the policy between turns (`rollout/environment.py`)."""

    @property
    def max_turns(self) -> int: ...

    async def reply(self, prompt: Prompt, turns: Sequence[dict[str, str]]) -> Reply | None:
        """Return the reply to the last of `turns`, or None to end the trajectory."""


@dataclass(frozen=True)
class ScoredGroups:
    """Groups with rewards, and the metrics of generating them."""

    groups: list[Group]
    num_reward_timeouts: int
    metrics: dict[str, Metric] = field(default_factory=dict)
    policy_version: int | None = None
    """Version of the trainer's weights when a recorded batch was first taken. None if engines generated the groups just
    now, or no trainer has taken them: then the run counts its own versions."""
    sampling: dict[str, float] | None = None
    """Sampling settings of a recorded batch, empty if unknown. None if engines generated the groups just now."""


async def generate_group(
    group: InFlightGroup,
    send: Send,
    decode: Decode,
    environment: Environment | None = None,
    *,
    max_failures: int,
    sticky: bool = True,
) -> None:
    """Send segments until every trajectory is finished; `environment` replies between turns.

    The trajectories start as one request, so that they share the prompt's KV cache, and continue independently.
    Trajectories restored from a checkpoint continue with the tokens that they have. `sticky` keeps aborted trajectories
    on their engine. Raises QuarantinedPrompt after `max_failures` failed requests in a row (`request_failures.py`).
    """
    limit, serial = group.sampling.max_response_length, group.prompt_serial

    async def attempt(request: GenerationRequest, failures: RequestFailures) -> Generated:
        """Return the output, which clears `failures`, or the partial output of a lost engine, which does not."""
        while True:
            sent, alone = failures.next_attempt(request), failures.must_be_alone
            try:
                engine, generated = await send(sent, prompt_serial=serial, prefer=group.engine, alone=alone)
                _check(group, request, generated)
            except RunError as error:
                group.num_failures += 1
                group.engine = None
                if failures.add(error):
                    raise QuarantinedPrompt(group.prompt.prompt.prompt_id, failures.reasons) from error
                if isinstance(error, EngineLost) and error.partial_output is not None:
                    return error.partial_output
            else:
                failures.clear(generated)
                aborted = any(completion.finish_reason == "abort" for completion in generated.completions)
                group.engine = engine if sticky or not aborted else None
                return generated

    async def finish(position: int, failures: RequestFailures) -> None:
        trajectory = group.trajectories[position]
        while trajectory.finish_reason is None:
            if trajectory.turn_ended:
                trajectory.end_turn(await _reply(group, trajectory, decode, environment), limit)
            else:
                generated = await attempt(_continuation(group, position), failures)
                trajectory.extend(generated.completions[0], generated.policy_version, limit)
        if environment is not None and (not trajectory.turns or trajectory.turns[-1]["role"] != "assistant"):
            trajectory.turns.append(await _turn(trajectory, decode))

    failures = RequestFailures(max_failures)
    if not group.trajectories:
        group.trajectories = _first_trajectories(await attempt(_first_request(group), failures), limit)
    try:
        async with asyncio.TaskGroup() as tasks:
            for position in range(len(group.trajectories)):
                tasks.create_task(finish(position, replace(failures, reasons=[*failures.reasons])))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def extend_by_outputs(group: InFlightGroup, partial_outputs: Mapping[str, Generated]) -> None:
    """Extend the group's trajectories by the partial outputs of its requests in flight, which are by identity.

    The group has no trajectories while it has no token.
    """
    limit = group.sampling.max_response_length
    if not group.trajectories and group.identity in partial_outputs:
        group.trajectories = _first_trajectories(partial_outputs[group.identity], limit)
        return
    for position, trajectory in enumerate(group.trajectories):
        if (output := partial_outputs.get(_continuation_identity(group, position))) is not None:
            trajectory.extend(output.completions[0], output.policy_version, limit)


def _first_trajectories(generated: Generated, max_response_length: int) -> list[PartialTrajectory]:
    trajectories = [PartialTrajectory() for _ in generated.completions]
    for trajectory, completion in zip(trajectories, generated.completions, strict=True):
        trajectory.extend(completion, generated.policy_version, max_response_length)
    return trajectories


async def _reply(
    group: InFlightGroup, trajectory: PartialTrajectory, decode: Decode, environment: Environment | None
) -> Reply | None:
    """Return the environment's reply to the turn that has just ended, or None if the trajectory ends."""
    if environment is None:
        return None
    turns, reply = [*trajectory.turns, await _turn(trajectory, decode)], None
    num_turns = sum(message["role"] == "assistant" for message in turns)
    if num_turns < environment.max_turns and trajectory.num_tokens < group.sampling.max_response_length:
        reply = await environment.reply(group.prompt.prompt, turns)
    trajectory.turns = turns  # only now: a checkpoint saved during the call stores a turn that awaits its reply
    return reply


async def _turn(trajectory: PartialTrajectory, decode: Decode) -> dict[str, str]:
    return {"role": "assistant", "content": await text_of(trajectory.turn_segments, decode)}


def _first_request(group: InFlightGroup) -> GenerationRequest:
    sampling = group.sampling
    return GenerationRequest(
        request_id=group.identity,
        context=(group.prompt.token_ids,),
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=_segment_length(sampling, 0),
        seed=_seed(group.identity),
    )


def _continuation(group: InFlightGroup, position: int) -> GenerationRequest:
    trajectory, identity = group.trajectories[position], _continuation_identity(group, position)
    return replace(
        _first_request(group),
        request_id=identity,
        context=(group.prompt.token_ids, *(segment.token_ids for segment in trajectory.segments)),
        num_routed=sum(map(len, trajectory.routes)),
        n=1,
        max_tokens=_segment_length(group.sampling, trajectory.num_tokens),
        seed=_seed(identity),
    )


def _continuation_identity(group: InFlightGroup, position: int) -> str:
    """Return the identity of the request that continues the trajectory at `position`."""
    return f"{group.identity}:{position}:{group.trajectories[position].num_tokens}"


def _segment_length(sampling: Sampling, num_tokens: int) -> int:
    num_left = sampling.max_response_length - num_tokens
    return num_left if sampling.token_budget is None else min(num_left, sampling.token_budget)


def _seed(identity: str) -> int:
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=4).digest()) >> 1


def _check(group: InFlightGroup, request: GenerationRequest, generated: Generated) -> None:
    prompt_id = group.prompt.prompt.prompt_id
    if len(generated.completions) != request.n:
        raise RunError(
            f"an engine returned {len(generated.completions)} completions for prompt {prompt_id}, not {request.n}"
        )
    for completion in generated.completions:
        if len(completion.token_ids) == 0 and completion.finish_reason != "abort":
            raise RunError(f"an engine returned a completion without tokens for prompt {prompt_id}")
