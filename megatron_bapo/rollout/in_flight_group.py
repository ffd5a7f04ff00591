"""A prompt's trajectories while they are generated: the tokens so far, in segments of one request each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.event_loop import own_turn
from megatron_bapo.records import FinishReason, Group, Trajectory, VersionSpan
from megatron_bapo.rollout.engine_routes import joined_routes
from megatron_bapo.rollout.messages import Completion
from megatron_bapo.rollout.tokenization import TokenizedPrompt

Decode = Callable[[np.ndarray], Awaitable[str]]
"""Decodes token ids to text without special tokens."""


@dataclass(frozen=True)
class Reply:
    """An environment's reply to a turn of the policy."""

    message: dict[str, str]
    token_ids: np.ndarray
    """int32 tokens of the reply and of the chat template around it, up to the start of the policy's next turn."""


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
    kept_tokens: list[np.ndarray] = field(default_factory=list)
    """The same of the tokens that sampling has kept, from the first sampled token on."""

    def extend(self, segment: Completion, policy_version: int, max_response_length: int) -> None:
        """Append sampled tokens, and end the turn or the trajectory if the segment does."""
        self.routes += [] if segment.routes is None else [segment.routes]
        self.kept_tokens += [] if segment.kept_tokens is None else [segment.kept_tokens]
        if (num := len(segment.token_ids)) > 0:
            self.append(replace(segment, routes=None, kept_tokens=None))
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
        lists = {name: [*value] for name, value in vars(self).items() if isinstance(value, list)}
        return replace(self, **lists)

    def append(self, segment: Completion | Reply) -> None:
        self.segments.append(segment)
        self.num_tokens += len(segment.token_ids)

    def move_to(self, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Copy the segments' tokens [R] and log-probs [num_sampled] into these arrays, which they use from now on."""
        segments, start, num_sampled = list[Completion | Reply](), 0, 0
        for segment in self.segments:
            end = start + len(segment.token_ids)
            token_ids[start:end] = segment.token_ids
            moved = replace(segment, token_ids=token_ids[start:end])
            if isinstance(segment, Completion) and isinstance(moved, Completion):
                own = log_probs[num_sampled : num_sampled + len(segment.log_probs)]
                own[:] = segment.log_probs
                moved, num_sampled = replace(moved, log_probs=own), num_sampled + len(own)
            segments.append(moved)
            start = end
        self.segments = segments

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
        texts = await asyncio.gather(*(text_of(partial.segments, decode) for partial in self.trajectories))
        return Group(self.prompt.prompt, tuple(map(self._finished, self.trajectories, await self._joined(), texts)))

    async def _joined(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Move the tokens into one block of memory; return the response tokens and log-probs of each trajectory.

        The system gets the block back once it is freed; small ones would leave holes. The engines' replies are freed.
        """
        sizes = [(t.num_tokens, sum(len(each.log_probs) for each in t.sampled)) for t in self.trajectories]
        block, joined, start = np.empty(sum(map(sum, sizes)), np.int32), list[tuple[np.ndarray, np.ndarray]](), 0
        for trajectory, (num_tokens, num_sampled) in zip(self.trajectories, sizes, strict=True):
            end = start + num_tokens + num_sampled
            joined.append((block[start : start + num_tokens], block[start + num_tokens : end].view(np.float32)))
            async with own_turn():
                trajectory.move_to(*joined[-1])
            start = end
        return joined

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
            kept_tokens=joined_parts(partial.kept_tokens),
        )


def joined_parts(parts: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the parts that engines have returned, one after another; None without parts."""
    return np.concatenate(parts) if parts else None


def oldest_versions(groups: Mapping[int, InFlightGroup]) -> dict[int, int]:
    """Return the oldest policy version of each group that has tokens, by serial number."""
    versions = ((serial, group.oldest_version) for serial, group in groups.items())
    return {serial: version for serial, version in versions if version is not None}


async def text_of(segments: Sequence[Completion | Reply], decode: Decode) -> str:
    """Return the text of consecutive segments."""
    # Segments are decoded together: a segment may end within a character.
    if len(segments) == 1 and isinstance(segments[0], Completion) and segments[0].text:
        return segments[0].text
    return await decode(np.concatenate([segment.token_ids for segment in segments]))


def batch_seed(seed: int, batch: int) -> int:
    """Return the seed of a batch of a run with this seed."""
    return int(np.random.SeedSequence([seed, batch]).generate_state(1)[0] >> 1)


def create_in_flight_group(
    prompt: TokenizedPrompt, sampling: Sampling, *, batch_seed: int, index: int, prompt_serial: int
) -> InFlightGroup:
    """Return a group without tokens; `batch_seed` and its `index` in the batch make its sampling seeds unique."""
    return InFlightGroup(prompt, sampling, f"{batch_seed}:{index}:{prompt.prompt.prompt_id}", prompt_serial)
