"""Distributions of prompt and response lengths, as equally likely lengths."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import mul
from statistics import NormalDist, pstdev

from megatron_bapo.config.schema import Config
from megatron_bapo.planning.hardware import Assumptions

NUM_QUANTILES = 2048
NUM_PACKED = 512
"""Number of sequences in the packing from which the fill of micro-batches is taken."""
NUM_BISECTIONS = 40


def lognormal_quantiles(mean: float, sigma: float, limit: int) -> tuple[int, ...]:
    """Return `NUM_QUANTILES` quantiles of a lognormal with `sigma`, clipped to `limit`, whose mean is then `mean`.

    Lengths are in tokens, sorted.
    """
    normal, longest = NormalDist(), math.log(limit)
    scores = [normal.inv_cdf((i + 0.5) / NUM_QUANTILES) for i in range(NUM_QUANTILES)]

    def lengths(mu: float) -> list[float]:
        return [max(1.0, math.exp(min(mu + sigma * score, longest))) for score in scores]

    mu = root(lambda mu: sum(lengths(mu)) / NUM_QUANTILES, mean, -5.0, longest + 5 * sigma)
    return tuple(round(length) for length in lengths(mu))


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
    responses: tuple[int, ...]
    """Sorted."""

    @cached_property
    def mean_response(self) -> float:
        return sum(self.responses) / len(self.responses)

    @cached_property
    def mean_square(self) -> float:
        """Mean square of the lengths of a prompt and its response."""
        return sum((self.prompt + length) ** 2 for length in self.responses) / len(self.responses)

    @cached_property
    def variation(self) -> float:
        """Standard deviation of the response lengths over their mean."""
        return pstdev(self.responses) / self.mean_response

    @cached_property
    def halfway(self) -> float:
        """Mean tokens generated so far of a response that runs at a random moment: E[L^2] / (2 E[L]), as long ones run
        longer."""
        return sum(length**2 for length in self.responses) / (2 * sum(self.responses))

    def reaching(self, num_tokens: float) -> float:
        """Return the share of responses with more than `num_tokens` tokens."""
        return 1 - bisect_right(self.responses, num_tokens) / len(self.responses)

    def running_of_group(self, n: int) -> float:
        """Return how many of `n` responses that start together run on average, until the longest of them ends."""
        return _running_of_group(self, n)

    def fill(self, budget: int) -> float:
        """Return the mean fraction of a micro-batch's token budget that packed sequences fill."""
        fills = _packed(self, budget)
        return sum(fills) / len(fills)

    def fullest(self, budget: int, num_ranks: int) -> float:
        """Return the expected fraction that the fullest of `num_ranks` micro-batches fills."""
        fills = _packed(self, budget)
        below = [(i / len(fills)) ** num_ranks for i in range(len(fills) + 1)]
        return sum(fill * (after - before) for fill, (before, after) in zip(fills, pairwise(below), strict=True))


@lru_cache(maxsize=256)
def _distribution(prompt: float, mean: float, sigma: float, limit: int) -> Lengths:
    return Lengths(prompt, lognormal_quantiles(mean, sigma, limit))


@lru_cache(maxsize=256)
def _running_of_group(lengths: Lengths, n: int) -> float:
    num = len(lengths.responses)
    shares = (((i + 1) / num) ** n - (i / num) ** n for i in range(num))  # of groups whose longest is the i-th
    return n * lengths.mean_response / sum(map(mul, lengths.responses, shares))


@lru_cache(maxsize=1024)
def _packed(lengths: Lengths, budget: int) -> tuple[float, ...]:
    """Return the filled fraction of each micro-batch, sorted, if sequences are packed by first fit, longest first.

    `data/packing.py` fills micro-batches greedily as well.
    """
    rooms: list[float] = []
    step = len(lengths.responses) // NUM_PACKED
    for response in reversed(lengths.responses[step // 2 :: step]):
        length = lengths.prompt + response
        for index, room in enumerate(rooms):
            if length <= room:
                rooms[index] -= length
                break
        else:
            rooms.append(max(0.0, budget - length))
    return tuple(sorted(1 - room / budget for room in rooms))
