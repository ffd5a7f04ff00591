"""What every rank knows of each trajectory of a rollout batch: lengths, reward, policy versions and how it ended.

The columns take some 35 bytes for a trajectory, whatever its length, because thousands of ranks receive those of the
whole batch. Legend: B trajectories; V version spans of all of them, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_bapo.records import Trajectory, VersionSpan

PLACEHOLDER = np.int32(-1), np.int32(-1), np.float32(np.nan), np.int32(-1)
"""Placeholders for prompt tokens, response tokens, log-probs and kept tokens that a rank does not have."""
_PLACEHOLDERS = tuple(np.broadcast_to(value, 1 << 40) for value in PLACEHOLDER)
_NO_TOKENS = np.broadcast_to(np.False_, 1 << 40)
_MASK_WORD = 32
"""Tokens of a loss mask in one 32-bit word."""
_FINISH_REASONS = "stop", "length"


@dataclass(frozen=True)
class BatchHeader:
    """Facts of all trajectories of a batch, as columns."""

    lengths_B4: np.ndarray
    """int32 lengths of prompt, response, log-probs and kept tokens, which are 0 if the trajectories have none."""
    rewards_B: np.ndarray
    """float64"""
    finish_reasons_B: np.ndarray
    """int8 index of the finish reason."""
    num_spans_B: np.ndarray
    """int32 number of version spans."""
    spans_V2: np.ndarray
    """int32 policy version and number of tokens of each span."""
    has_routes: bool = False
    """Whether any trajectory has routes, which are scattered separately (`scatter_routes.py`)."""
    has_teacher: bool = False
    """Whether the trajectories have the teacher's log-probs."""

    @staticmethod
    def of(trajectories: Sequence[Trajectory]) -> BatchHeader:
        """Return the header of a batch."""
        spans = [(span.policy_version, span.num_tokens) for t in trajectories for span in t.version_spans]
        taught = [trajectory.teacher_log_probs is not None for trajectory in trajectories]
        assert any(taught) == all(taught) or not taught, "the teacher has scored all trajectories of a batch or none"
        return BatchHeader(
            np.array([[len(array) for array in _arrays(t)] for t in trajectories], np.int32).reshape(-1, 4),
            np.array([t.reward for t in trajectories], np.float64),
            np.array([_FINISH_REASONS.index(t.finish_reason) for t in trajectories], np.int8),
            np.array([len(t.version_spans) for t in trajectories], np.int32),
            np.array(spans, np.int32).reshape(-1, 2),
            any(t.routes is not None for t in trajectories),
            any(taught),
        )

    @property
    def num_words_B(self) -> np.ndarray:
        """int64 sizes of the trajectories in 32-bit words, as `words` writes them."""
        prompt_B, response_B, log_probs_B, kept_B = self.lengths_B4.astype(np.int64).T
        mask_B = np.where(log_probs_B < response_B, _round_up(response_B) // _MASK_WORD, 0)
        return prompt_B + response_B + (1 + self.has_teacher) * log_probs_B + kept_B + mask_B

    def trajectories(self) -> list[Trajectory]:
        """Return trajectories without texts, whose arrays are placeholders."""
        spans = np.split(self.spans_V2, np.cumsum(self.num_spans_B)[:-1])
        columns = self.lengths_B4.tolist(), self.rewards_B.tolist(), self.finish_reasons_B.tolist(), spans
        return [
            Trajectory(
                **placeholders(*lengths, has_teacher=self.has_teacher),
                version_spans=tuple(VersionSpan(*span) for span in own.tolist()),
                finish_reason=_FINISH_REASONS[reason],
                text="",
                reward=reward,
            )
            for lengths, reward, reason, own in zip(*columns, strict=True)
        ]


def placeholders(
    num_prompt: int, num_response: int, num_log_probs: int, num_kept: int = 0, *, has_teacher: bool = False
) -> dict[str, Any]:
    """Return a trajectory's arrays, of the right lengths, with `PLACEHOLDER` throughout; they use no memory.

    The loss mask of a response that an environment has written a part of is False throughout.
    """
    lengths = num_prompt, num_response, num_log_probs, num_kept
    prompt, response, log_probs, kept = (array[:num] for array, num in zip(_PLACEHOLDERS, lengths, strict=True))
    mask = None if num_log_probs == num_response else _NO_TOKENS[:num_response]
    return _fields(prompt, response, log_probs, kept, log_probs if has_teacher else None, mask) | {"routes": None}


def is_placeholder(array: np.ndarray) -> bool:
    """Return whether all the array has is one value, which stands for those that this rank does not have."""
    return array.strides == (0,)


def without_tokens(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with placeholders for its arrays."""
    lengths, has_teacher = map(len, _arrays(trajectory)), trajectory.teacher_log_probs is not None
    return replace(trajectory, **placeholders(*lengths, has_teacher=has_teacher))


def words(trajectory: Trajectory) -> list[np.ndarray]:
    """Return the arrays of a trajectory as int32; log-probs are reinterpreted, and loss masks are packed to bits."""
    taught = [] if trajectory.teacher_log_probs is None else [trajectory.teacher_log_probs]
    parts = [array.view(np.int32) for array in (*_arrays(trajectory), *taught)]
    if (mask := trajectory.loss_mask) is not None and len(trajectory.behaviour_log_probs) < len(mask):
        padded = np.zeros(_round_up(len(mask)), bool)
        padded[: len(mask)] = mask
        parts.append(np.packbits(padded).view(np.int32))
    return parts


def with_words(trajectory: Trajectory, words: np.ndarray) -> Trajectory:
    """Return the trajectory of `words`, joined, which share their memory; `trajectory` has placeholders."""
    lengths, has_teacher = [len(array) for array in _arrays(trajectory)], trajectory.teacher_log_probs is not None
    ends = np.cumsum([*lengths, has_teacher * lengths[2]])
    prompt, response, log_probs, kept, teacher, packed = np.split(words, ends)
    mask = np.unpackbits(packed.view(np.uint8), count=lengths[1]).astype(bool) if len(packed) else None
    teacher = teacher.view(np.float32) if has_teacher else None
    return replace(trajectory, **_fields(prompt, response, log_probs.view(np.float32), kept, teacher, mask))


def _arrays(trajectory: Trajectory) -> tuple[np.ndarray, ...]:
    kept = np.zeros(0, np.int32) if trajectory.kept_tokens is None else trajectory.kept_tokens
    return trajectory.prompt_token_ids, trajectory.response_token_ids, trajectory.behaviour_log_probs, kept


def _fields(
    prompt: np.ndarray,
    response: np.ndarray,
    log_probs: np.ndarray,
    kept: np.ndarray,
    teacher: np.ndarray | None,
    mask: np.ndarray | None,
) -> dict[str, np.ndarray | None]:
    return {
        "prompt_token_ids": prompt,
        "response_token_ids": response,
        "behaviour_log_probs": log_probs,
        "kept_tokens": kept if len(kept) else None,
        "teacher_log_probs": teacher,
        "loss_mask": mask,
    }


def _round_up(num_tokens: Any) -> Any:
    return -(-num_tokens // _MASK_WORD) * _MASK_WORD
