"""Values that cross process borders. NumPy only, so that every process can import them cheaply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length"]


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
    """A run of consecutive response tokens sampled by one policy version."""

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
    """float32 [R], log-prob of each response token under the policy that sampled it, at the sampling temperature."""
    version_spans: tuple[VersionSpan, ...]
    """Their token counts sum to R."""
    finish_reason: FinishReason
    text: str
    """The decoded response, special tokens left out."""
    reward: float = float("nan")
    """NaN until scored."""
    answer: str | None = None
    """What the reward function read in the text, where it says so; not written with rollouts."""


@dataclass(frozen=True)
class Group:
    """One prompt's trajectories."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
