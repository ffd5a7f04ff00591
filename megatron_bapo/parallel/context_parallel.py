"""Zigzag split of a sequence over context-parallel ranks.

The sequence is split into 2 x size chunks. Rank r has chunk r and, counted from the end, chunk 2 x size - 1 - r, so
causal attention costs the same on every rank (Megatron's order, `get_batch_on_this_cp_rank`).
"""

from __future__ import annotations

import numpy as np


def zigzag(length: int, rank: int, size: int) -> np.ndarray:
    """Return the positions of the rank's tokens in a sequence of `length` tokens, in local order, int64."""
    assert length % (2 * size) == 0 or size == 1, f"{length} tokens do not split into {2 * size} chunks"
    if size == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])
