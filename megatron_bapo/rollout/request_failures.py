"""When failures of an engine request quarantine its prompt, and when the request is retried alone on an engine.

A lost engine takes all of its requests with it, and at most one of them has caused the loss. It therefore counts as a
failure only of a request that was alone on the engine. Requests that were on several lost engines in a row are retried
alone, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron_bapo.errors import RunError
from megatron_bapo.rollout.messages import EngineLost, Generated, GenerationRequest

MIN_LOST_ENGINES = 2
"""Fewest lost engines in a row after which a request is retried alone; with a higher limit on failures, one less than
the limit."""
FIRST_TRIAL_TOKENS = 256
"""Most tokens of each completion in the first trial; each further trial of a trajectory has 16 times as many, so that
a request that ends its engine late is found too."""


@dataclass
class RequestFailures:
    """Failures in a row of one request and of those that continue it."""

    limit: int
    """Number of failures that quarantine the prompt (`rollout.max_request_failures`)."""
    reasons: list[str] = field(default_factory=list)
    _num: int = 0
    """Number of failures that count towards `limit`."""
    _num_lost: int = 0
    """Number of lost engines that the request shared with others."""
    _num_trials: int = 0
    """Number of times that the request was alone on an engine and succeeded."""

    @property
    def must_be_alone(self) -> bool:
        """Whether the next attempt is a trial, which has an engine for itself."""
        return self._num_lost >= max(MIN_LOST_ENGINES, self.limit - 1)

    def next_attempt(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with an id of its own; a trial generates fewer tokens, because others wait meanwhile."""
        sent = replace(request, request_id=f"{request.request_id}#{len(self.reasons)}")
        if not self.must_be_alone:
            return sent
        return replace(sent, max_tokens=min(request.max_tokens, FIRST_TRIAL_TOKENS * 16**self._num_trials))

    def add(self, error: RunError) -> bool:
        """Record the failure of the last attempt; return whether the prompt is quarantined."""
        self.reasons.append(str(error))
        if isinstance(error, EngineLost) and not error.was_alone:
            self._num_lost += 1
        else:
            self._num += 1
        return self._num >= self.limit

    def clear(self, generated: Generated) -> None:
        """Forget the failures after a success; a trial that was aborted is repeated."""
        if self.must_be_alone:
            if any(completion.finish_reason == "abort" for completion in generated.completions):
                return
            self._num_trials += 1
        self.reasons.clear()
        self._num = self._num_lost = 0
