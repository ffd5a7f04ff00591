"""The tokens of a request in flight: what its engine has, and what it has reported.

The report is needed if the engine is lost or a checkpoint is saved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from megatron_bapo.rollout.messages import Completion, Generated, SegmentEnd

_GROWTH = 1.1
"""Size of a new array relative to what it must hold, so that appending rarely copies."""


class PartialOutput:
    """The tokens that an engine has reported of a request so far. Arrays that were returned never change."""

    def __init__(self) -> None:
        self._policy_version = 0
        self._completions: list[PartialCompletion] = []

    def extend(self, delta: Generated) -> None:
        """Append the tokens since the last report.

        A report from a request's start replaces what is recorded. One that does not continue it is ignored, because an
        earlier report was lost with an engine's restart.
        """
        if not any(completion.num_before for completion in delta.completions):
            self._policy_version = delta.policy_version
            self._completions = [PartialCompletion() for _ in delta.completions]
        if [partial.num for partial in self._completions] != [each.num_before for each in delta.completions]:
            return
        for partial, completion in zip(self._completions, delta.completions, strict=True):
            partial.extend(completion.token_ids, completion.log_probs, completion.finish_reason)

    @property
    def lengths(self) -> list[tuple[int, bool]]:
        """Tokens of each completion, and whether it has ended; empty before the first report."""
        return [(partial.num, partial.has_ended) for partial in self._completions]

    def generated(self) -> Generated | None:
        """Return the tokens without copying them; None if there are none."""
        completions = tuple(partial.completion() for partial in self._completions)
        has_tokens = any(len(completion.token_ids) for completion in completions)
        return Generated(self._policy_version, completions) if has_tokens else None


class PartialCompletion:
    """A completion that grows at its end."""

    def __init__(self) -> None:
        self.num = 0
        self._token_ids = np.empty(0, np.int32)
        self._log_probs = np.empty(0, np.float32)
        self._finish_reason: SegmentEnd = "abort"

    @property
    def has_ended(self) -> bool:
        return self._finish_reason != "abort"

    def extend(self, token_ids: ArrayLike, log_probs: ArrayLike, finish_reason: SegmentEnd) -> None:
        """Append tokens [N] with their log-probs [N]; `finish_reason` is `abort` if others may follow."""
        new_ids, new_log_probs = np.asarray(token_ids, np.int32), np.asarray(log_probs, np.float32)
        assert len(new_ids) == len(new_log_probs), "one log-prob per sampled token"
        self._finish_reason = finish_reason
        start, self.num = self.num, self.num + len(new_ids)
        if self.num > len(self._token_ids):
            self._token_ids = _grown(self._token_ids, start, self.num)
            self._log_probs = _grown(self._log_probs, start, self.num)
        self._token_ids[start : self.num] = new_ids
        self._log_probs[start : self.num] = new_log_probs

    def completion(self, start: int = 0, text: str = "") -> Completion:
        """Return the tokens from `start` on, without copying them."""
        part = slice(start, self.num)
        return Completion(self._token_ids[part], self._log_probs[part], self._finish_reason, text, start)


def _grown(values: np.ndarray, num_kept: int, num: int) -> np.ndarray:
    """Return a larger array with the first `num_kept` values; the old one belongs to those who have seen it."""
    grown = np.empty(int(num * _GROWTH), values.dtype)
    grown[:num_kept] = values[:num_kept]
    return grown
