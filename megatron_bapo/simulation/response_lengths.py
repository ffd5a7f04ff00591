"""Distributions of response lengths, as arrays of equally likely lengths."""

from __future__ import annotations

import numpy as np

from megatron_bapo.planning.response_lengths import lognormal_quantiles


def lognormal_lengths(mean: float, sigma: float, limit: int) -> np.ndarray:
    """Return the planner's quantiles of a lognormal with `sigma`, clipped to `limit`, as int32 [NUM_QUANTILES]."""
    return np.array(lognormal_quantiles(mean, sigma, limit), np.int32)
