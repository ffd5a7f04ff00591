"""Requests to engines and their results. NumPy only, because every process of a run imports this file."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from megatron_bapo.errors import RunError

SegmentEnd = Literal["stop", "length", "abort"]
"""Why a completion ended: `length` means `max_tokens` were generated, `abort` that the request was aborted."""


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to sample `n` completions of."""

    request_id: str
    """Unique among requests in flight."""
    context: tuple[np.ndarray, ...]
    """int32 tokens of the prompt, followed by the segments of the partial response if one is continued. They are not
    joined, because thousands of requests may wait for an engine."""
    n: int
    """Number of completions."""
    temperature: float
    top_p: float
    top_k: int
    """Number of most likely tokens to sample from; -1 means all."""
    min_p: float
    max_tokens: int
    """Maximum tokens per completion, the end-of-sequence token included."""
    seed: int
    """Seed of the first completion; the i-th samples with seed + i."""
    num_routed: int = 0
    """Tokens at the start of the context whose routes the sender has, so that the engine does not return them."""
    scores_context: bool = False
    """Whether to return the log-probs of the context's tokens, too."""

    @property
    def prompt_token_ids(self) -> np.ndarray:
        """int32 [P] tokens of the context, joined."""
        return self.context[0] if len(self.context) == 1 else np.concatenate(self.context)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(token_ids) for token_ids in self.context)


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: np.ndarray
    """int32 [R], with the end-of-sequence token when `finish_reason` is `stop`; R may be 0 when it is `abort`."""
    log_probs: np.ndarray
    """float32 [R] log-prob of each sampled token at the sampling temperature, in nats."""
    finish_reason: SegmentEnd
    text: str
    """Decoded tokens without special tokens."""
    num_before: int = 0
    """Tokens of this completion in earlier progress reports of the same request; 0 for a whole completion."""
    routes: np.ndarray | None = None
    """Experts of the context's and this completion's tokens, int8 or int16 [N, L, K]: from `num_routed` of the request
    on, without the last token, which has not entered the model. None if the engine does not return routes."""
    context_log_probs: np.ndarray | None = None
    """float32 [P - 1] log-prob of each token of the context but the first, at the engine's scoring temperature, in
    nats; None without `scores_context`."""
    kept_tokens: np.ndarray | None = None
    """int32 [M] tokens that each of the R was sampled from, as `kept_tokens.py` joins them; None if the engine does not
    return them, or if R is 0."""

    def with_own_arrays(self) -> Completion:
        """Return the same completion without views of memory that belongs to others."""
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **{name: array.copy() for name, array in arrays.items()})


@dataclass(frozen=True)
class Generated:
    """Output of a request: its completions and the policy version that sampled them."""

    policy_version: int
    completions: tuple[Completion, ...]

    def with_own_arrays(self) -> Generated:
        """Return the same output without views of memory that belongs to others."""
        return replace(self, completions=tuple(completion.with_own_arrays() for completion in self.completions))


class EngineLost(RunError):
    """The engine is dead, hangs or cannot be reached; its requests in flight must be sent to another engine."""

    def __init__(self, reason: str, partial_output: Generated | None = None, *, was_alone: bool = False) -> None:
        """`partial_output` is what the engine had reported of the request in flight.

        `was_alone` says that the engine had no other request, so that this one may have caused the loss.
        """
        super().__init__(reason)
        self.partial_output = partial_output
        self.was_alone = was_alone


@dataclass(frozen=True)
class SequenceScore:
    """Log-probs of a given sequence under one policy version."""

    policy_version: int
    log_probs: np.ndarray
    """float32 [S - 1] log-prob of each token but the first, given the tokens before it, at temperature 1, in nats. All
    log-probs but `decoded_log_probs` are computed by prefill."""
    decoded_log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [D] log-probs of the tokens that the engine has sampled after the sequence, as it decoded them."""
    rescored_log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [D] log-probs of the same tokens, computed by prefill."""


@dataclass(frozen=True)
class CompletedRequest:
    """Record of a served request; times are seconds of the scheduler's clock."""

    prompt_serial: int
    """Serial number of its prompt; negative for held-out prompts."""
    engine: str
    sent_s: float
    answered_s: float
    num_prompt_tokens: int
    """Number of prompt tokens, including a partial response that is continued."""
    num_tokens: tuple[int, ...]
    """Number of tokens generated for each completion."""


class GenerationEngine(Protocol):
    """The engine interface that the scheduler uses, real or modelled; calls raise EngineLost if the engine is lost."""

    async def generate(self, request: GenerationRequest) -> Generated: ...

    async def abort(self) -> None:
        """Abort every request in flight; each returns the tokens generated so far."""

    async def load_weights(self, version: int) -> None: ...

    async def progress(self) -> dict[str, Generated]:
        """Return, by request id, the tokens of requests in flight since the last call, without texts.

        Returning at all shows that the engine is healthy. Completions that have not ended have the finish reason
        `abort`.
        """
        ...
