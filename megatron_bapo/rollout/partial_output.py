"""What an engine has reported of a request in flight, in case the engine is lost or a checkpoint is saved."""

from __future__ import annotations

import numpy as np

from megatron_bapo.rollout.messages import Completion, Generated, SegmentEnd

_GROWTH = 1.1
"""Size of a new array relative to what it must hold, so that appending rarely copies."""


class PartialOutput:
    """The tokens that an engine has reported of a request so far. Arrays that were returned never change."""

    def __init__(self) -> None:
        self._policy_version = 0
        self._completions: list[_PartialCompletion] = []

    def extend(self, delta: Generated) -> None:
        """Append the tokens since the last report.

        A report from a request's start replaces what is recorded. One that does not continue it is ignored, because an
        earlier report was lost with an engine's restart.
        """
        if not any(completion.num_before for completion in delta.completions):
            self._policy_version = delta.policy_version
            self._completions = [_PartialCompletion() for _ in delta.completions]
        if [partial.num for partial in self._completions] != [each.num_before for each in delta.completions]:
            return
        for partial, completion in zip(self._completions, delta.completions, strict=True):
            partial.extend(completion)

    @property
    def lengths(self) -> list[tuple[int, bool]]:
        """Tokens of each completion, and whether it has ended; empty before the first report."""
        return [(partial.num, partial.has_ended) for partial in self._completions]

    def generated(self) -> Generated | None:
        """Return the tokens without copying them; None if there are none."""
        completions = tuple(partial.completion() for partial in self._completions)
        has_tokens = any(len(completion.token_ids) for completion in completions)
        return Generated(self._policy_version, completions) if has_tokens else None


class _PartialCompletion:
    def __init__(self) -> None:
        self.num = 0
        self._token_ids = np.empty(0, np.int32)
        self._log_probs = np.empty(0, np.float32)
        self._finish_reason: SegmentEnd = "abort"

    @property
    def has_ended(self) -> bool:
        return self._finish_reason != "abort"

    def extend(self, delta: Completion) -> None:
        self._finish_reason = delta.finish_reason
        start, self.num = self.num, self.num + len(delta.token_ids)
        if self.num > len(self._token_ids):
            self._token_ids = _grown(self._token_ids, start, self.num)
            self._log_probs = _grown(self._log_probs, start, self.num)
        self._token_ids[start : self.num] = delta.token_ids
        self._log_probs[start : self.num] = delta.log_probs

    def completion(self) -> Completion:
        return Completion(self._token_ids[: self.num], self._log_probs[: self.num], self._finish_reason, "")


def _grown(values: np.ndarray, num_kept: int, num: int) -> np.ndarray:
    """Return a larger array with the first `num_kept` values; the old one belongs to those who have seen it."""
    grown = np.empty(int(num * _GROWTH), values.dtype)
    grown[:num_kept] = values[:num_kept]
    return grown
