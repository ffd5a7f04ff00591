"""Estimate of how long responses become, from which the router knows how many of them an engine's KV cache holds."""

from __future__ import annotations

UNKNOWN_FRACTION = 4
"""Without any finished response, this fraction of the limit is expected: 1 / 4. If responses become longer, an engine
preempts some; if they are shorter, the first ones end soon and correct the estimate."""
NUM_AVERAGED = 16384
"""Completions that the mean covers. More than a batch has, because the short ones of a batch end first, and few enough
to follow the policy, whose responses may become several times longer during a run."""


class ResponseLengths:
    """Mean length of the completions that have ended, which decays exponentially after `NUM_AVERAGED` of them."""

    def __init__(self) -> None:
        self._num = 0
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Count a completion that has ended without being aborted."""
        if self._num == NUM_AVERAGED:
            self._num_tokens -= self._num_tokens // NUM_AVERAGED
        else:
            self._num += 1
        self._num_tokens += num_tokens

    def expected(self, max_tokens: int) -> int:
        """Return the expected tokens of a completion that has at most `max_tokens`."""
        if not self._num:
            return -(-max_tokens // UNKNOWN_FRACTION)
        return min(max_tokens, -(-self._num_tokens // self._num))

    def state_dict(self) -> dict[str, int]:
        return {"num": self._num, "num_tokens": self._num_tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._num = min(state["num"], NUM_AVERAGED)
        # Checkpoints of earlier versions have the sum over all completions.
        self._num_tokens = state["num_tokens"] * self._num // max(1, state["num"])
