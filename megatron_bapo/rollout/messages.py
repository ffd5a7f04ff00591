"""What goes to an engine and what comes back; NumPy only, because every process of a run reads it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_bapo.records import FinishReason


@dataclass(frozen=True)
class GenerationRequest:
    request_id: str
    prompt_token_ids: np.ndarray
    """int32 [P]"""
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
    """int32 [R], with the end-of-sequence token when `finish_reason` is `stop`."""
    log_probs: np.ndarray
    """float32 [R], of each sampled token at the sampling temperature, in nats."""
    finish_reason: FinishReason
    text: str
    """Special tokens left out."""


@dataclass(frozen=True)
class Generated:
    policy_version: int
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class SequenceScore:
    policy_version: int
    log_probs: np.ndarray
    """float32 [S - 1], of each token but the first given those before it, at temperature 1, in nats."""
