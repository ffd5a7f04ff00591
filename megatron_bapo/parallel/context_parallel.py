"""How context-parallel ranks share a sequence.

The sequence is cut into 2 x size chunks; rank r holds chunk r and, from the other end, chunk 2 x size - 1 - r, so that
causal attention costs every rank the same (Megatron's order, `get_batch_on_this_cp_rank`).
"""

from __future__ import annotations

import numpy as np


def zigzag(length: int, rank: int, size: int) -> np.ndarray:
    """Positions in a sequence of `length` tokens that the rank holds, in the order in which it holds them, int64."""
    assert length % (2 * size) == 0 or size == 1, f"{length} tokens do not split into {2 * size} chunks"
    if size == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])
