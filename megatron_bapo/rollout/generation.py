"""An answer grows in segments: each is one request to an engine, and knows the policy version that sampled it.

An unfinished answer keeps its tokens, behaviour log-probs and versions, and goes on (prompt and partial answer as the
new prompt) on whatever engine and under whatever policy comes next. Partial rollouts, aborted requests, engines that
die and an environment's replies between two turns are all the same here. Tokens are only ever appended: what was
sampled is never encoded anew.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.metrics.values import Metric
from megatron_bapo.records import FinishReason, Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.messages import Completion, EngineLost, Generated, GenerationRequest
from megatron_bapo.rollout.tokenization import TokenizedPrompt

Decode = Callable[[np.ndarray], str]
"""Token ids of a whole answer to its text, special tokens left out."""


class Send(Protocol):
    """One request to any engine: that engine's name and its answer (`Router.generate`)."""

    def __call__(
        self, request: GenerationRequest, *, order: int, prefer: str | None
    ) -> Awaitable[tuple[str, Generated]]: ...


@dataclass(frozen=True)
class Reply:
    """What an environment says to a turn."""

    message: dict[str, str]
    token_ids: np.ndarray
    """int32, with what the chat template puts around it, up to where the policy's next turn begins."""


class Environment(Protocol):
    """What answers the policy between turns (`rollout/environment.py`)."""

    @property
    def max_turns(self) -> int: ...

    async def reply(self, prompt: Prompt, turns: Sequence[dict[str, str]]) -> Reply | None:
        """To the last one of `turns`; None ends the answer."""


@dataclass(frozen=True)
class Sampling:
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_response_length: int
    token_budget: int | None = None
    """Tokens of one segment; None: the whole answer."""


def rollout_sampling(settings: RolloutConfig) -> Sampling:
    """How training rollouts are drawn."""
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
    groups: list[Group]
    num_reward_timeouts: int
    metrics: dict[str, Metric] = field(default_factory=dict)
    policy_version: int | None = None
    """Of the trainer's weights when it took these groups first, where they come from a file."""


class SetAside(RunError):
    """Engines failed at the prompt's request as often as is allowed, or a function at its answers."""

    def __init__(self, prompt_id: str, failures: Sequence[str]) -> None:
        super().__init__(f"prompt {prompt_id} failed {len(failures)} times, the last time with: {failures[-1]}")
        self.prompt_id = prompt_id
        self.failures = tuple(failures)


class FailureAllowance:
    """So many functions' failures cost a prompt each; one more ends the run."""

    def __init__(self, num: int) -> None:
        self._num = num
        self.num_used = 0

    def use(self, prompt_id: str, failure: FunctionFailed) -> SetAside:
        """What becomes of the prompt. Raises FunctionFailed when the allowance is used up."""
        if self.num_used == self._num:
            raise FunctionFailed(
                f"{failure}\n{self._num} prompts of this batch failed before (rollout.max_reward_failures)"
            )
        self.num_used += 1
        return SetAside(prompt_id, [str(failure)])


@dataclass
class Answer:
    """One trajectory on its way."""

    segments: list[Completion | Reply] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    turns: list[dict[str, str]] = field(default_factory=list)
    """The finished ones and the replies to them, where there is an environment."""
    num_tokens: int = 0
    turn_ended: bool = False
    """The policy has ended a turn, and the environment has not replied yet."""
    finish_reason: FinishReason | None = None

    def extend(self, segment: Completion, policy_version: int, max_response_length: int) -> None:
        if (num := len(segment.token_ids)) > 0:
            self.append(segment)
            if self.spans and self.spans[-1].policy_version == policy_version:
                num += self.spans.pop().num_tokens
            self.spans.append(VersionSpan(policy_version, num))
        if segment.finish_reason == "stop":
            self.turn_ended = True
        elif self.num_tokens == max_response_length:
            self.finish_reason = "length"

    def end_turn(self, reply: Reply | None, max_response_length: int) -> None:
        """The answer is finished without a reply, and where none of its tokens, or of a next turn, has room."""
        self.turn_ended = False
        if reply is None:
            self.finish_reason = "stop"
        elif self.num_tokens + len(reply.token_ids) >= max_response_length:
            self.finish_reason = "length"
        else:
            self.append(reply)
            self.turns.append(reply.message)

    def append(self, segment: Completion | Reply) -> None:
        self.segments.append(segment)
        self.num_tokens += len(segment.token_ids)

    @property
    def turn_segments(self) -> list[Completion]:
        """Of the turn that is going on, or has just ended."""
        last = max((i for i, segment in enumerate(self.segments) if isinstance(segment, Reply)), default=-1)
        return [segment for segment in self.segments[last + 1 :] if isinstance(segment, Completion)]

    @property
    def sampled(self) -> list[Completion]:
        return [segment for segment in self.segments if isinstance(segment, Completion)]

    @property
    def loss_mask(self) -> np.ndarray | None:
        """bool [R]; None where every token was sampled."""
        if len(self.sampled) == len(self.segments):
            return None
        return np.concatenate([np.full(len(s.token_ids), isinstance(s, Completion)) for s in self.segments])


@dataclass
class GrowingGroup:
    """One prompt's trajectories on their way, and what its engines did to it."""

    prompt: TokenizedPrompt
    sampling: Sampling
    identity: str
    """All seeds derive from it."""
    order: int
    """Lower goes first."""
    answers: list[Answer] = field(default_factory=list)
    engine: str | None = None
    """The one that has the prompt's prefix."""
    num_failures: int = 0
    """Requests that engines failed at and that were sent again."""

    @property
    def oldest_version(self) -> int | None:
        """The policy version of the oldest token."""
        return min((answer.spans[0].policy_version for answer in self.answers if answer.spans), default=None)

    def group(self, decode: Decode) -> Group:
        """The finished group; rewards are still NaN."""
        return Group(self.prompt.prompt, tuple(self._trajectory(answer, decode) for answer in self.answers))

    def _trajectory(self, answer: Answer, decode: Decode) -> Trajectory:
        assert answer.finish_reason is not None, "the answer is unfinished"
        return Trajectory(
            prompt_token_ids=self.prompt.token_ids,
            response_token_ids=np.concatenate([segment.token_ids for segment in answer.segments]),
            behaviour_log_probs=np.concatenate([segment.log_probs for segment in answer.sampled]),
            version_spans=tuple(answer.spans),
            finish_reason=answer.finish_reason,
            text=_text(answer.segments, decode),
            loss_mask=answer.loss_mask,
            turns=tuple(answer.turns),
        )


def growing_group(
    prompt: TokenizedPrompt, sampling: Sampling, *, batch_seed: int, index: int, order: int
) -> GrowingGroup:
    """A group before its first token. `batch_seed` and the `index` in the batch make its seeds its own."""
    return GrowingGroup(prompt, sampling, f"{batch_seed}:{index}:{prompt.prompt.prompt_id}", order)


async def grow(
    group: GrowingGroup,
    send: Send,
    decode: Decode,
    environment: Environment | None = None,
    *,
    max_failures: int,
    sticky: bool = True,
) -> None:
    """Send segments until every answer is finished; `environment` replies between the turns of each.

    The answers start as one request, so that they share the prompt's keys and values, and go on each on its own; those
    that are there already go on with what they have.
    `sticky` keeps answers that were aborted on their engine. Raises SetAside after `max_failures` failed requests.
    """
    limit = group.sampling.max_response_length

    async def attempt(request: GenerationRequest, failures: list[str]) -> Generated:
        """The answer, or what is known of it from an engine that was lost; then `failures` are not over."""
        while True:
            sent = replace(request, request_id=f"{request.request_id}#{len(failures)}")
            try:
                engine, generated = await send(sent, order=group.order, prefer=group.engine)
                _check(group, request, generated)
            except RunError as error:
                failures.append(str(error))
                group.num_failures += 1
                group.engine = None
                if len(failures) >= max_failures:
                    raise SetAside(group.prompt.prompt.prompt_id, failures) from error
                if isinstance(error, EngineLost) and error.known is not None:
                    return error.known
            else:
                failures.clear()
                aborted = any(completion.finish_reason == "abort" for completion in generated.completions)
                group.engine = engine if sticky or not aborted else None
                return generated

    async def finish(position: int, failures: list[str]) -> None:
        answer = group.answers[position]
        while answer.finish_reason is None:
            if answer.turn_ended:
                answer.end_turn(await _reply(group, answer, decode, environment), limit)
            else:
                generated = await attempt(_continuation(group, position), failures)
                answer.extend(generated.completions[0], generated.policy_version, limit)
        if environment is not None and (not answer.turns or answer.turns[-1]["role"] != "assistant"):
            answer.turns.append(_turn(answer, decode))

    failures: list[str] = []
    if not group.answers:
        group.answers = _first_answers(await attempt(_first_request(group), failures), limit)
    try:
        async with asyncio.TaskGroup() as tasks:
            for position in range(len(group.answers)):
                tasks.create_task(finish(position, [*failures]))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def answers_so_far(group: GrowingGroup, told: Mapping[str, Generated]) -> list[Answer]:
    """What the answers have, with what engines have `told` of the requests in flight, by their ids; the group stays.

    Empty while nothing is known of any.
    """
    limit, known = group.sampling.max_response_length, {name.rpartition("#")[0]: news for name, news in told.items()}
    if not group.answers:
        return _first_answers(known[group.identity], limit) if group.identity in known else []
    answers = [replace(a, segments=[*a.segments], spans=[*a.spans], turns=[*a.turns]) for a in group.answers]
    for position, answer in enumerate(answers):
        if (news := known.get(_identity(group, position))) is not None:
            answer.extend(news.completions[0], news.policy_version, limit)
    return answers


def _first_answers(generated: Generated, max_response_length: int) -> list[Answer]:
    answers = [Answer() for _ in generated.completions]
    for answer, completion in zip(answers, generated.completions, strict=True):
        answer.extend(completion, generated.policy_version, max_response_length)
    return answers


async def _reply(group: GrowingGroup, answer: Answer, decode: Decode, environment: Environment | None) -> Reply | None:
    """The environment's, to the turn that has just ended; None is the answer's end."""
    if environment is None:
        return None
    turns, reply = [*answer.turns, _turn(answer, decode)], None
    num_turns = sum(message["role"] == "assistant" for message in turns)
    if num_turns < environment.max_turns and answer.num_tokens < group.sampling.max_response_length:
        reply = await environment.reply(group.prompt.prompt, turns)
    answer.turns = turns  # not before: who saves the answer meanwhile has a turn that waits for its reply
    return reply


def _turn(answer: Answer, decode: Decode) -> dict[str, str]:
    return {"role": "assistant", "content": _text(answer.turn_segments, decode)}


def _text(segments: Sequence[Completion | Reply], decode: Decode) -> str:
    # Segments do not end where characters do.
    if len(segments) == 1 and isinstance(segments[0], Completion) and segments[0].text:
        return segments[0].text
    return decode(np.concatenate([segment.token_ids for segment in segments]))


def _first_request(group: GrowingGroup) -> GenerationRequest:
    sampling = group.sampling
    return GenerationRequest(
        request_id=group.identity,
        prompt_token_ids=group.prompt.token_ids,
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=_segment_length(sampling, 0),
        seed=_seed(group.identity),
    )


def _continuation(group: GrowingGroup, position: int) -> GenerationRequest:
    answer, identity = group.answers[position], _identity(group, position)
    tokens = [group.prompt.token_ids, *(segment.token_ids for segment in answer.segments)]
    return replace(
        _first_request(group),
        request_id=identity,
        prompt_token_ids=np.concatenate(tokens),
        n=1,
        max_tokens=_segment_length(group.sampling, answer.num_tokens),
        seed=_seed(identity),
    )


def _identity(group: GrowingGroup, position: int) -> str:
    """Of the request that continues an answer."""
    return f"{group.identity}:{position}:{group.answers[position].num_tokens}"


def _segment_length(sampling: Sampling, num_tokens: int) -> int:
    left = sampling.max_response_length - num_tokens
    return left if sampling.token_budget is None else min(left, sampling.token_budget)


def _seed(identity: str) -> int:
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=4).digest()) >> 1


def _check(group: GrowingGroup, request: GenerationRequest, generated: Generated) -> None:
    prompt_id = group.prompt.prompt.prompt_id
    if len(generated.completions) != request.n:
        raise RunError(f"an engine gave prompt {prompt_id} {len(generated.completions)} answers instead of {request.n}")
    for completion in generated.completions:
        if len(completion.token_ids) == 0 and completion.finish_reason != "abort":
            raise RunError(f"an engine answered prompt {prompt_id} without a single token")
