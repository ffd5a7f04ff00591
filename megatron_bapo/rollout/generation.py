"""Generate a prompt's trajectories in segments: each segment is one engine request under one policy version.

A partial trajectory keeps its tokens, log-probs, routes and version spans. The next request sends the prompt and the
partial response as a new prompt to any engine, whatever policy version that engine serves. Partial rollouts, aborted
requests, lost engines and an environment's replies take this path. Sampled tokens are never tokenized again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.errors import RunError
from megatron_bapo.metrics.values import Metric
from megatron_bapo.records import FinishReason, Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.engine_routes import joined_routes
from megatron_bapo.rollout.messages import Completion, EngineLost, Generated, GenerationRequest
from megatron_bapo.rollout.quarantine import QuarantinedPrompt
from megatron_bapo.rollout.request_failures import RequestFailures
from megatron_bapo.rollout.tokenization import TokenizedPrompt

Decode = Callable[[np.ndarray], Awaitable[str]]
"""Decodes token ids to text without special tokens."""


class Send(Protocol):
    """Sends a request to any engine; returns the engine's name and its completions (`Router.generate`)."""

    def __call__(
        self, request: GenerationRequest, *, prompt_serial: int, prefer: str | None, alone: bool
    ) -> Awaitable[tuple[str, Generated]]: ...


@dataclass(frozen=True)
class Reply:
    """An environment's reply to a turn of the policy."""

    message: dict[str, str]
    token_ids: np.ndarray
    """int32 tokens of the reply and of the chat template around it, up to the start of the policy's next turn."""


class Environment(Protocol):
    """Replies to the policy between turns (`rollout/environment.py`)."""

    @property
    def max_turns(self) -> int: ...

    async def reply(self, prompt: Prompt, turns: Sequence[dict[str, str]]) -> Reply | None:
        """Return the reply to the last of `turns`, or None to end the trajectory."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one group."""

    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_response_length: int
    token_budget: int | None = None
    """Maximum tokens per segment; None generates the whole response in one request."""


def rollout_sampling(settings: RolloutConfig) -> Sampling:
    """Return the sampling parameters of training rollouts."""
    return Sampling(
        n=settings.n,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_response_length=settings.max_response_length,
        token_budget=settings.partial_rollout.token_budget,
    )


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


@dataclass
class PartialTrajectory:
    """A trajectory that is being generated."""

    segments: list[Completion | Reply] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[dict[str, str]] = field(default_factory=list)
    """Finished turns of the policy and the environment's replies; empty without an environment."""
    num_tokens: int = 0
    turn_ended: bool = False
    """Whether the policy has ended a turn to which the environment has not replied yet."""
    finish_reason: FinishReason | None = None
    routes: list[np.ndarray] = field(default_factory=list)
    """Consecutive parts of the routes, from the prompt's first token on, as the engines returned them."""

    def extend(self, segment: Completion, policy_version: int, max_response_length: int) -> None:
        """Append sampled tokens, and end the turn or the trajectory if the segment does."""
        self.routes += [] if segment.routes is None else [segment.routes]
        if (num := len(segment.token_ids)) > 0:
            self.append(replace(segment, routes=None))
            if self.spans and self.spans[-1].policy_version == policy_version:
                num += self.spans.pop().num_tokens
            self.spans.append(VersionSpan(policy_version, num))
        if segment.finish_reason == "stop":
            self.turn_ended = True
        elif self.num_tokens == max_response_length:
            self.finish_reason = "length"

    def end_turn(self, reply: Reply | None, max_response_length: int) -> None:
        """Append the environment's reply.

        The trajectory is finished if there is no reply, or if the reply leaves no room for a further token.
        """
        self.turn_ended = False
        if reply is None:
            self.finish_reason = "stop"
        elif self.num_tokens + len(reply.token_ids) >= max_response_length:
            self.finish_reason = "length"
        else:
            self.append(reply)
            self.turns.append(reply.message)

    def copy(self) -> PartialTrajectory:
        """Return a trajectory that does not change with this one; it shares the arrays, which never change."""
        return replace(self, **{name: [*getattr(self, name)] for name in ("segments", "spans", "turns", "routes")})

    def append(self, segment: Completion | Reply) -> None:
        self.segments.append(segment)
        self.num_tokens += len(segment.token_ids)

    @property
    def turn_segments(self) -> list[Completion]:
        """The segments of the current turn, or of the turn that has just ended."""
        last = max((i for i, segment in enumerate(self.segments) if isinstance(segment, Reply)), default=-1)
        return [segment for segment in self.segments[last + 1 :] if isinstance(segment, Completion)]

    @property
    def sampled(self) -> list[Completion]:
        """The segments that the policy sampled."""
        return [segment for segment in self.segments if isinstance(segment, Completion)]

    @property
    def loss_mask(self) -> np.ndarray | None:
        """bool [R], True for sampled tokens; None if every token was sampled."""
        if len(self.sampled) == len(self.segments):
            return None
        return np.concatenate([np.full(len(s.token_ids), isinstance(s, Completion)) for s in self.segments])


@dataclass
class InFlightGroup:
    """One prompt's trajectories while they are being generated."""

    prompt: TokenizedPrompt
    sampling: Sampling
    identity: str
    """Prefix of all request ids; all sampling seeds derive from it."""
    prompt_serial: int
    """Priority at the router; lower goes first."""
    trajectories: list[PartialTrajectory] = field(default_factory=list)
    engine: str | None = None
    """Name of the engine that has the prompt in its prefix cache."""
    num_failures: int = 0
    """Number of failed requests."""

    @property
    def oldest_version(self) -> int | None:
        """The policy version of the oldest token."""
        return min((partial.spans[0].policy_version for partial in self.trajectories if partial.spans), default=None)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the responses so far, in tokens."""
        return [partial.num_tokens for partial in self.trajectories]

    async def group(self, decode: Decode) -> Group:
        """Return the finished group; its rewards are still NaN."""
        texts = await asyncio.gather(*(_text(partial.segments, decode) for partial in self.trajectories))
        return Group(self.prompt.prompt, tuple(map(self._finished, self.trajectories, self._joined(), texts)))

    def _joined(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the response tokens and log-probs of each trajectory.

        They share one block of memory, which the system gets back once it is freed; small ones would leave holes.
        """
        parts = [([s.token_ids for s in t.segments], [s.log_probs for s in t.sampled]) for t in self.trajectories]
        block = np.concatenate([array.view(np.int32) for pair in parts for part in pair for array in part])
        sizes = [sum(map(len, part)) for pair in parts for part in pair]
        joined = np.split(block, np.cumsum(sizes)[:-1])
        return [(ids, log_probs.view(np.float32)) for ids, log_probs in zip(joined[::2], joined[1::2], strict=True)]

    def _finished(self, partial: PartialTrajectory, joined: tuple[np.ndarray, np.ndarray], text: str) -> Trajectory:
        assert partial.finish_reason is not None, "the trajectory is unfinished"
        return Trajectory(
            prompt_token_ids=self.prompt.token_ids,
            response_token_ids=joined[0],
            behaviour_log_probs=joined[1],
            version_spans=tuple(partial.spans),
            finish_reason=partial.finish_reason,
            text=text,
            loss_mask=partial.loss_mask,
            turns=tuple(partial.turns),
            routes=joined_routes(partial.routes, len(self.prompt.token_ids) + partial.num_tokens - 1),
        )


def oldest_versions(groups: Mapping[int, InFlightGroup]) -> dict[int, int]:
    """Return the oldest policy version of each group that has tokens, by serial number."""
    versions = ((serial, group.oldest_version) for serial, group in groups.items())
    return {serial: version for serial, version in versions if version is not None}


def batch_seed(seed: int, batch: int) -> int:
    """Return the seed of a batch of a run with this seed."""
    return int(np.random.SeedSequence([seed, batch]).generate_state(1)[0] >> 1)


def create_in_flight_group(
    prompt: TokenizedPrompt, sampling: Sampling, *, batch_seed: int, index: int, prompt_serial: int
) -> InFlightGroup:
    """Return a group without tokens; `batch_seed` and its `index` in the batch make its sampling seeds unique."""
    return InFlightGroup(prompt, sampling, f"{batch_seed}:{index}:{prompt.prompt.prompt_id}", prompt_serial)


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
    return {"role": "assistant", "content": await _text(trajectory.turn_segments, decode)}


async def _text(segments: Sequence[Completion | Reply], decode: Decode) -> str:
    # Segments are decoded together: a segment may end within a character.
    if len(segments) == 1 and isinstance(segments[0], Completion) and segments[0].text:
        return segments[0].text
    return await decode(np.concatenate([segment.token_ids for segment in segments]))


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
