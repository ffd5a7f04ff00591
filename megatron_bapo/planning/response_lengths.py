"""Distributions of response lengths, as arrays of equally likely lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np

from megatron_bapo.config.schema import Config
from megatron_bapo.planning.hardware import Assumptions

NUM_QUANTILES = 2048
NUM_PACKED = 512
"""Number of sequences in the packing from which the fill of micro-batches is taken."""
NUM_INTERVALS = 64
"""Intervals of equal length in which the running sequences of a batch are counted."""
NUM_BISECTIONS = 40


def lognormal_lengths(mean: float, sigma: float, limit: int) -> np.ndarray:
    """Return the quantiles of a lognormal with `sigma`, clipped to `limit`, whose mean after clipping is `mean`.

    Lengths are in tokens; the result is int32 [NUM_QUANTILES].
    """
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / NUM_QUANTILES) for i in range(NUM_QUANTILES)])

    def lengths(mu: float) -> np.ndarray:
        return np.clip(np.exp(np.minimum(mu + sigma * scores, np.log(limit))), 1.0, limit)

    mu = root(lambda mu: float(lengths(mu).mean()), mean, -5.0, float(np.log(limit)) + 5 * sigma)
    return np.rint(lengths(mu)).astype(np.int32)


def root(
    increasing: Callable[[float], float], target: float, low: float, high: float, num_bisections: int = NUM_BISECTIONS
) -> float:
    """Return where an increasing function reaches `target`, by bisection, or the nearer end of the range."""
    for _ in range(num_bisections):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < target else (low, middle)
    return (low + high) / 2


def prompt_length(config: Config, assumptions: Assumptions) -> float:
    """Return the mean tokens of a prompt."""
    return config.data.max_prompt_length * assumptions.mean_prompt_fraction


def mean_response(config: Config, assumptions: Assumptions) -> float:
    return config.rollout.max_response_length * assumptions.mean_response_fraction


def mean_length(config: Config, assumptions: Assumptions) -> float:
    """Return the mean tokens of a prompt and its response."""
    return prompt_length(config, assumptions) + mean_response(config, assumptions)


def lengths_of(config: Config, assumptions: Assumptions) -> Lengths:
    """Return the assumed distribution of the lengths of prompts and responses."""
    return _distribution(
        prompt_length(config, assumptions),
        mean_response(config, assumptions),
        assumptions.length_sigma,
        config.rollout.max_response_length,
    )


@dataclass(frozen=True, eq=False)
class Lengths:
    """A distribution of lengths in tokens: prompts of one length, and equally likely response lengths."""

    prompt: float
    responses: np.ndarray
    """Sorted, int32 [NUM_QUANTILES]."""

    @cached_property
    def mean_response(self) -> float:
        return float(self.responses.mean())

    @cached_property
    def mean_square(self) -> float:
        """Mean square of the lengths of a prompt and its response."""
        return float(np.square(self.prompt + self.responses).mean())

    @cached_property
    def halfway(self) -> float:
        """Mean tokens generated so far of a response that runs at a random moment: E[L^2] / (2 E[L]), as long ones run
        longer."""
        return float(np.square(self.responses.astype(float)).mean()) / (2 * self.mean_response)

    @cached_property
    def running(self) -> tuple[tuple[float, float], ...]:
        """(Tokens generated, share of the responses that are longer) in the middle of each of `NUM_INTERVALS` equal
        intervals up to the longest response."""
        middles = (np.arange(NUM_INTERVALS) + 0.5) * self.interval
        shorter = np.searchsorted(self.responses, middles, side="right")
        return tuple(zip(middles.tolist(), (1 - shorter / len(self.responses)).tolist(), strict=True))

    @property
    def interval(self) -> float:
        return float(self.responses[-1]) / NUM_INTERVALS

    @cached_property
    def peak_tokens(self) -> float:
        """Most tokens that a batch holds at a time, per sequence, if all of its sequences start together."""
        return max(share * (self.prompt + generated) for generated, share in self.running)

    def fill(self, budget: int) -> float:
        """Return the mean fraction of a micro-batch's token budget that packed sequences fill."""
        return float(_packed(self, budget).mean())

    def fullest(self, budget: int, num_ranks: int) -> float:
        """Return the expected fraction that the fullest of `num_ranks` micro-batches fills."""
        fills = _packed(self, budget)
        below = (np.arange(len(fills) + 1) / len(fills)) ** num_ranks
        return float(np.dot(fills, np.diff(below)))


@lru_cache(maxsize=256)
def _distribution(prompt: float, mean: float, sigma: float, limit: int) -> Lengths:
    return Lengths(prompt, lognormal_lengths(mean, sigma, limit))


@lru_cache(maxsize=1024)
def _packed(lengths: Lengths, budget: int) -> np.ndarray:
    """Return the filled fraction of each micro-batch, sorted, if sequences are packed by first fit, longest first.

    `data/packing.py` fills micro-batches greedily as well.
    """
    rooms: list[float] = []
    step = len(lengths.responses) // NUM_PACKED
    for length in (lengths.prompt + lengths.responses[step // 2 :: step])[::-1].tolist():
        for index, room in enumerate(rooms):
            if length <= room:
                rooms[index] -= length
                break
        else:
            rooms.append(max(0.0, budget - length))
    return np.sort(1 - np.array(rooms) / budget)
