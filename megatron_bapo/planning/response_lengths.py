"""Distributions of response lengths, as arrays of equally likely lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from megatron_bapo.config.schema import Config
from megatron_bapo.planning.hardware import Assumptions

NUM_QUANTILES = 2048
NUM_PACKED = 512
"""Number of sequences in the packing from which the fill of micro-batches is taken."""
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


def response_lengths(config: Config, assumptions: Assumptions) -> tuple[int, ...]:
    """Return equally likely response lengths in tokens, sorted: quantiles of the assumed distribution."""
    return _quantiles(mean_response(config, assumptions), assumptions.length_sigma, config.rollout.max_response_length)


def total_lengths(config: Config, assumptions: Assumptions) -> tuple[int, ...]:
    """Return equally likely lengths of a prompt of mean length and its response, in tokens."""
    prompt = round(prompt_length(config, assumptions))
    return tuple(prompt + length for length in response_lengths(config, assumptions))


def mean_square(config: Config, assumptions: Assumptions) -> float:
    """Return the mean square of the lengths of a prompt and its response."""
    return _mean_square(total_lengths(config, assumptions))


def packed_fill(lengths: tuple[int, ...], budget: int) -> float:
    """Return the mean fraction of a micro-batch's token budget that sequences of these lengths fill."""
    fills = _packed(lengths, budget)
    return sum(fills) / len(fills)


def fullest_of(lengths: tuple[int, ...], budget: int, num_ranks: int) -> float:
    """Return the expected fraction that the fullest of `num_ranks` micro-batches fills."""
    fills = _packed(lengths, budget)
    shares = (np.arange(1, len(fills) + 1) / len(fills)) ** num_ranks
    return float(np.dot(fills, np.diff(shares, prepend=0.0)))


@lru_cache(maxsize=256)
def _packed(lengths: tuple[int, ...], budget: int) -> tuple[float, ...]:
    """Return the filled fraction of each micro-batch, sorted, if sequences are packed by first fit, longest first.

    The trainer packs in the same way (`trainer/packing`).
    """
    rooms: list[int] = []
    chosen = [lengths[(2 * i + 1) * len(lengths) // (2 * NUM_PACKED)] for i in range(NUM_PACKED)]
    for length in sorted(chosen, reverse=True):
        for index, room in enumerate(rooms):
            if length <= room:
                rooms[index] -= length
                break
        else:
            rooms.append(max(0, budget - length))
    return tuple(sorted(1 - room / budget for room in rooms))


@lru_cache(maxsize=256)
def _quantiles(mean: float, sigma: float, limit: int) -> tuple[int, ...]:
    return tuple(lognormal_lengths(mean, sigma, limit).tolist())


@lru_cache(maxsize=256)
def _mean_square(lengths: tuple[int, ...]) -> float:
    return float(np.mean(np.square(np.array(lengths, float))))
