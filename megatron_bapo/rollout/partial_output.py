"""The tokens of a request in flight: what its engine has, and what it has reported.

The report is needed if the engine is lost or a checkpoint is saved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from megatron_bapo.rollout.messages import Completion, Generated, SegmentEnd

_GROWTH = 1.1
"""Size of a new array relative to what it must hold, so that appending rarely copies."""
_BLOCK_GROWTH = 2.0
"""The same of a request's block. The end that was not written yet takes no memory."""


class PartialOutput:
    """The tokens that an engine has reported of a request so far. Arrays that were returned never change.

    Those of all completions are in one block of memory, which the system gets back once it is freed; small arrays would
    leave holes in the heap, which take as much memory as the tokens when many requests end at once.
    """

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
        self._make_room(max((each.num_before + len(each.token_ids) for each in delta.completions), default=0))
        for partial, completion in zip(self._completions, delta.completions, strict=True):
            partial.extend(completion.token_ids, completion.log_probs, completion.finish_reason, completion.kept_tokens)

    def _make_room(self, num: int) -> None:
        """Make room for `num` tokens in each completion."""
        if all(num <= partial.capacity for partial in self._completions):
            return
        block = np.empty((len(self._completions), 2, int(num * _BLOCK_GROWTH)), np.int32)
        for partial, (token_ids, log_probs) in zip(self._completions, block, strict=True):
            partial.move_to(token_ids, log_probs.view(np.float32))

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
        self.num = self.num_kept = 0
        """Numbers of tokens, and of kept tokens of all of them."""
        self._token_ids = np.empty(0, np.int32)
        self._log_probs = np.empty(0, np.float32)
        self._finish_reason: SegmentEnd = "abort"
        self._kept_tokens = np.empty(0, np.int32)

    @property
    def capacity(self) -> int:
        """Number of tokens for which there is memory."""
        return len(self._token_ids)

    @property
    def has_ended(self) -> bool:
        return self._finish_reason != "abort"

    def extend(
        self,
        token_ids: ArrayLike,
        log_probs: ArrayLike,
        finish_reason: SegmentEnd,
        kept_tokens: np.ndarray | None = None,
    ) -> None:
        """Append tokens [N] with their log-probs [N] and the tokens that they were sampled from (`kept_tokens.py`).

        `finish_reason` is `abort` if others may follow.
        """
        new_ids, new_log_probs = np.asarray(token_ids, np.int32), np.asarray(log_probs, np.float32)
        assert len(new_ids) == len(new_log_probs), "one log-prob per sampled token"
        self._finish_reason = finish_reason
        if (num := self.num + len(new_ids)) > self.capacity:
            size = int(num * _GROWTH)
            self.move_to(np.empty(size, np.int32), np.empty(size, np.float32))
        if kept_tokens is not None:
            self._keep(kept_tokens)
        start, self.num = self.num, num
        self._token_ids[start : self.num] = new_ids
        self._log_probs[start : self.num] = new_log_probs

    def move_to(self, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Go on in larger arrays; the old ones belong to those who have seen them."""
        token_ids[: self.num], log_probs[: self.num] = self._token_ids[: self.num], self._log_probs[: self.num]
        self._token_ids, self._log_probs = token_ids, log_probs

    def completion(self, start: int = 0, kept_start: int = 0) -> Completion:
        """Return the tokens from `start` on, and the kept ones from `kept_start` on, without copying them."""
        part, kept = slice(start, self.num), self._kept_tokens[kept_start : self.num_kept]
        token_ids, log_probs = self._token_ids[part], self._log_probs[part]
        return Completion(token_ids, log_probs, self._finish_reason, "", start, kept_tokens=kept if len(kept) else None)

    def _keep(self, kept_tokens: np.ndarray) -> None:
        """Append kept tokens in the same way."""
        if (num := self.num_kept + len(kept_tokens)) > len(self._kept_tokens):
            larger = np.empty(int(num * _GROWTH), np.int32)
            larger[: self.num_kept] = self._kept_tokens[: self.num_kept]
            self._kept_tokens = larger
        start, self.num_kept = self.num_kept, num
        self._kept_tokens[start:num] = kept_tokens
