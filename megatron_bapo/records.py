"""Values that cross process borders. NumPy only, so that every process can import them cheaply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]

SOLVED = 1.0
"""The reward from which on an answer counts as solved."""


@dataclass(frozen=True)
class Prompt:
    """One task. `prompt_id` is stable over runs: `<source>:<index>`."""

    prompt_id: str
    messages: tuple[dict[str, str], ...]
    """Chat messages (`role`, `content`). A plain text prompt is one user message."""
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    """JSON values handed to the reward function unchanged."""


@dataclass(frozen=True)
class VersionSpan:
    """A run of consecutive sampled tokens of one policy version."""

    policy_version: int
    num_tokens: int


@dataclass(frozen=True)
class Trajectory:
    """One sampled answer."""

    prompt_token_ids: np.ndarray
    """int32 [P]"""
    response_token_ids: np.ndarray
    """int32 [R], R >= 1; ends with the end-of-sequence token when `finish_reason` is `stop`."""
    behaviour_log_probs: np.ndarray
    """float32 [S], log-prob of each sampled token under the policy that sampled it, at the sampling temperature."""
    version_spans: tuple[VersionSpan, ...]
    """Their token counts sum to S."""
    finish_reason: FinishReason
    text: str
    """The decoded response, special tokens left out."""
    reward: float = float("nan")
    """NaN until scored."""
    answer: str | None = None
    """What the reward function read in the text, where it says so; not written with rollouts."""
    loss_mask: np.ndarray | None = None
    """bool [R], the S tokens that the policy sampled; the others are the environment's, and only context. None: all."""
    turns: tuple[dict[str, str], ...] = ()
    """Chat messages: the policy's turns and the environment's replies. Empty without an environment."""

    @property
    def sampled_positions(self) -> np.ndarray:
        """[S], into the response."""
        return np.arange(len(self.response_token_ids)) if self.loss_mask is None else np.flatnonzero(self.loss_mask)

    @property
    def num_sampled(self) -> int:
        """S, the tokens that are trained on."""
        return len(self.response_token_ids) if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """The answer as chat messages."""
        return self.turns or ({"role": "assistant", "content": self.text},)

    @property
    def final_text(self) -> str:
        """What is scored: the policy's last turn."""
        return self.messages[-1]["content"]


@dataclass(frozen=True)
class Group:
    """One prompt's trajectories."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class BufferedGroup:
    """A scored group between its scoring and its last use."""

    serial: int
    """Of its prompt: the order in which prompts were drawn."""
    group: Group
    num_uses: int = 0

    @property
    def oldest_version(self) -> int:
        return min(span.policy_version for t in self.group.trajectories for span in t.version_spans)


@dataclass(frozen=True)
class UnfinishedAnswer:
    """What an answer on its way has got; the fields of `Trajectory`, and R may be 0."""

    response_token_ids: np.ndarray
    behaviour_log_probs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason | None
    """None: more tokens follow, the policy's or the environment's."""
    loss_mask: np.ndarray | None
    turns: tuple[dict[str, str], ...]
    turn_ended: bool
    """The policy has ended a turn, and the environment has not replied yet."""


@dataclass(frozen=True)
class UnfinishedGroup:
    """A prompt whose answers are on their way, or not scored yet."""

    serial: int
    prompt_id: str
    answers: tuple[UnfinishedAnswer, ...]


@dataclass(frozen=True)
class HeldRollouts:
    """What was generated for later batches, as a checkpoint keeps it."""

    buffered: tuple[BufferedGroup, ...] = ()
    unfinished: tuple[UnfinishedGroup, ...] = ()
