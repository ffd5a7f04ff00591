"""Values that are sent between processes. They need only NumPy, so that every process can import them quickly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]

NO_ROUTE = -1
"""Expert number of tokens without a recorded route: a mixture-of-experts layer chooses their experts by itself."""
SOLVED = 1.0
"""Lowest reward of a response that counts as correct."""


@dataclass(frozen=True)
class Prompt:
    """One task."""

    prompt_id: str
    """`<source>:<index>`, which is the same in every run."""
    messages: tuple[dict[str, str], ...]
    """Chat messages (`role`, `content`). A plain text prompt is one user message."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    """JSON values that the reward function receives unchanged."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Consecutive tokens that one policy version sampled."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sampled response. Its length is R tokens, of which the policy sampled S."""

    prompt_token_ids: np.ndarray
    """int32 [P]"""
    response_token_ids: np.ndarray
    """int32 [R], R >= 1; ends with the end-of-sequence token when `finish_reason` is `stop`."""
    behaviour_log_probs: np.ndarray
    """float32 [S], log-prob of each sampled token under the policy that sampled it, at the sampling temperature."""
    version_spans: tuple[VersionSpan, ...]
    """Policy versions of the sampled tokens, in order; the token counts sum to S."""
    finish_reason: FinishReason
    text: str
    """The decoded response without special tokens."""
    reward: float = float("nan")
    """NaN until the response is scored."""
    answer: str | None = None
    """Final answer that the reward function extracted from the text, if it reports one; not written to rollouts/."""
    loss_mask: np.ndarray | None = None
    """bool [R], true for the S tokens that the policy sampled. The other tokens are the environment's and only context.
    None: the policy sampled all of them."""
    turns: tuple[dict[str, str], ...] = ()
    """Chat messages of the policy's turns and the environment's replies; empty without an environment."""
    routes: np.ndarray | None = None
    """Experts that the engines chose for the P+R-1 tokens that enter the model, int8 or int16 [P+R-1, L, K], where L
    counts the layers with experts; on a trainer rank, those of its pipeline stage. Tokens without a route have
    `NO_ROUTE`. None without `algorithm.routing_replay=rollout`."""
    teacher_log_probs: np.ndarray | None = None
    """float32 [S], log-prob of each sampled token under the teacher, at the sampling temperature. None until the
    teacher's engines have scored the response, and without `algorithm.distillation.engines`."""
    kept_tokens: np.ndarray | None = None
    """int32 [M], the tokens that each sampled token was sampled from, as `kept_tokens.py` joins them. None without
    `algorithm.keep_sampling_mask`."""

    @property
    def sampled_positions(self) -> np.ndarray:
        """Positions [S] of the sampled tokens in the response."""
        return np.arange(len(self.response_token_ids)) if self.loss_mask is None else np.flatnonzero(self.loss_mask)

    @property
    def num_sampled(self) -> int:
        """S, the number of sampled tokens, which are those that are trained on."""
        return len(self.behaviour_log_probs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the response's tokens and log-probs, of the routes and of the kept tokens."""
        optional = self.routes, self.teacher_log_probs, self.kept_tokens
        arrays = self.response_token_ids, self.behaviour_log_probs, *(each for each in optional if each is not None)
        return sum(array.nbytes for array in arrays)

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The response as chat messages."""
        return self.turns or ({"role": "assistant", "content": self.text},)

    @property
    def final_text(self) -> str:
        """The policy's last turn, which is the text that is scored."""
        return self.messages[-1]["content"]


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one prompt."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def lengths(self) -> list[int]:
        """Lengths of the responses in tokens."""
        return [len(trajectory.response_token_ids) for trajectory in self.trajectories]


def grouped(prompts: Sequence[tuple[Prompt, int]], trajectories: Sequence[Trajectory]) -> list[Group]:
    """Return the groups of prompts with their numbers of trajectories, which are in the same order."""
    rest = iter(trajectories)
    return [Group(prompt, tuple(islice(rest, num))) for prompt, num in prompts]


@dataclass(frozen=True)
class BufferedGroup:
    """A scored group in the replay buffer."""

    serial: int
    """Serial number of its prompt, in the order in which prompts were taken from the stream."""
    group: Group
    num_uses: int = 0
    """Number of rollout batches that the group was part of."""

    @cached_property
    def oldest_version(self) -> int:
        """Oldest policy version of any token of the group."""
        return min(span.policy_version for t in self.group.trajectories for span in t.version_spans)


@dataclass(frozen=True)
class UnfinishedTrajectory:
    """A partial response. The fields are those of `Trajectory`, but R may be 0."""

    response_token_ids: np.ndarray
    behaviour_log_probs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason | None
    """None if more tokens follow, the policy's or the environment's."""
    loss_mask: np.ndarray | None
    turns: tuple[dict[str, str], ...]
    turn_ended: bool
    """Whether the policy has ended a turn that the environment has not replied to yet."""
    routes: np.ndarray | None = None
    """As in `Trajectory`, of the first tokens of prompt and response."""
    kept_tokens: np.ndarray | None = None


@dataclass(frozen=True)
class UnfinishedGroup:
    """A prompt whose responses are unfinished or not scored yet."""

    serial: int
    prompt_id: str
    trajectories: tuple[UnfinishedTrajectory, ...]


@dataclass(frozen=True)
class InFlightState:
    """Rollouts for later batches, as a checkpoint saves them."""

    buffered: tuple[BufferedGroup, ...] = ()
    """Scored groups in the replay buffer."""
    unfinished: Sequence[UnfinishedGroup] = ()
    """Groups that are still generated or scored."""
