"""Distributions of response lengths, as arrays of equally likely lengths."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np

NUM_QUANTILES = 2048
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
