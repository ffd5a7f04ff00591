"""How long answers become: lengths each of which is as likely as any other."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np

NUM_QUANTILES = 2048
_MOST_SIGMA = 3.0
_NUM_BISECTIONS = 40


def lognormal_lengths(mean: float, sigma: float, limit: int) -> np.ndarray:
    """int32 [NUM_QUANTILES]: quantiles of a lognormal with this `sigma`, cut at `limit`, whose mean after that is
    `mean`.
    """
    normal = NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / NUM_QUANTILES) for i in range(NUM_QUANTILES)])

    def lengths(mu: float) -> np.ndarray:
        return np.clip(np.exp(np.minimum(mu + sigma * scores, np.log(limit))), 1.0, limit)

    mu = _root(lambda mu: float(lengths(mu).mean()), mean, -5.0, float(np.log(limit)) + 5 * sigma)
    return np.rint(lengths(mu)).astype(np.int32)


def recorded_lengths(mean: float, longest: float, clip_ratio: float, num: int, limit: int) -> np.ndarray:
    """int32 [NUM_QUANTILES]: the lognormal, cut at `limit`, with the mean of a run's answers, and with their tail.

    Where answers were cut off, the tail is known by their share `clip_ratio`, else by `longest`, the mean over batches
    of the longest of `num` answers.
    """

    def tail(sigma: float) -> float:
        lengths = lognormal_lengths(mean, sigma, limit)
        return float((lengths >= limit).mean()) if clip_ratio > 0 else _expected_longest(lengths, num)

    target = clip_ratio if clip_ratio > 0 else longest
    return lognormal_lengths(mean, _root(tail, target, 0.01, _MOST_SIGMA), limit)


def _expected_longest(lengths: np.ndarray, num: int) -> float:
    """Of `num` answers: the chance that all are at most the i-th length is (i / N) ** num."""
    chances = np.diff((np.arange(len(lengths) + 1) / len(lengths)) ** num)
    return float(np.sort(lengths) @ chances)


def _root(growing: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a growing function reaches `target`, or the end of the range that is nearer."""
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if growing(middle) < target else (low, middle)
    return (low + high) / 2
