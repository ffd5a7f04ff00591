"""What goes to an engine and what comes back; NumPy only, because every process of a run reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from megatron_bapo.errors import RunError

SegmentEnd = Literal["stop", "length", "abort"]
"""`length`: the request's `max_tokens` are used up; `abort`: the engine was asked to let go of it."""


@dataclass(frozen=True)
class GenerationRequest:
    request_id: str
    """Unlike that of any other request in flight."""
    prompt_token_ids: np.ndarray
    """int32 [P]; of an answer that is continued, with the tokens that it has."""
    n: int
    """Number of completions."""
    temperature: float
    top_p: float
    top_k: int
    """-1: all tokens."""
    min_p: float
    max_tokens: int
    """Per completion, the end-of-sequence token included."""
    seed: int
    """Of the first completion; the i-th samples with seed + i."""


@dataclass(frozen=True)
class Completion:
    token_ids: np.ndarray
    """int32 [R], with the end-of-sequence token when `finish_reason` is `stop`; R may be 0 when it is `abort`."""
    log_probs: np.ndarray
    """float32 [R], of each sampled token at the sampling temperature, in nats."""
    finish_reason: SegmentEnd
    text: str
    """Special tokens left out."""


@dataclass(frozen=True)
class Generated:
    policy_version: int
    completions: tuple[Completion, ...]


class EngineLost(RunError):
    """The engine is dead, hangs or is out of reach; what was in flight on it has to go elsewhere."""

    def __init__(self, reason: str, known: Generated | None = None) -> None:
        """`known`: of a request in flight, what the engine had told of its answers."""
        super().__init__(reason)
        self.known = known


@dataclass(frozen=True)
class SequenceScore:
    policy_version: int
    log_probs: np.ndarray
    """float32 [S - 1], of each token but the first given those before it, at temperature 1, in nats."""


@dataclass(frozen=True)
class AnsweredRequest:
    """One request as it was served, for the record; seconds of the scheduler's clock."""

    order: int
    """Of its prompt; below 0 for held-out prompts."""
    engine: str
    sent_s: float
    answered_s: float
    num_prompt_tokens: int
    """Those of an answer that is continued included."""
    num_tokens: tuple[int, ...]
    """That were generated for each answer."""


class GenerationEngine(Protocol):
    """What the scheduler needs of an engine, real or modelled. A call raises EngineLost when there is none any more."""

    async def generate(self, request: GenerationRequest) -> Generated: ...

    async def abort(self) -> None:
        """Let go of every request in flight: each returns the tokens that it has."""

    async def load_weights(self, version: int) -> None: ...

    async def progress(self) -> dict[str, Generated]:
        """When the engine is able to serve: by id, what requests in flight have got since the last call, without texts.

        Completions that have not ended are given as aborted.
        """
        ...
