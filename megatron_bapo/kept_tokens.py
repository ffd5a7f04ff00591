"""The tokens that top-p, top-k and min-p have kept for each sampled token, in one array, which NumPy can join.

The set of a sampled token begins with that token, all of whose bits are flipped, so that it is negative; the others
follow in any order. Sets of consecutive tokens are one after another:

    sampled 5 of {5, 2, 9}, then 7 of {7}  ->  [~5, 2, 9, ~7]  =  [-6, 2, 9, -8]

Legend: S sampled tokens; M kept tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


def kept_tokens_of(token_ids: Sequence[int], sets: Sequence[Collection[int]]) -> np.ndarray:
    """Return the array of sampled tokens [S] and of the sets that they were sampled from, int32 [M].

    Raises ValueError if a token is not in its set.
    """
    joined = list[int]()
    for token, kept in zip(token_ids, sets, strict=True):
        others = [each for each in kept if each != token]
        if len(others) == len(kept):
            raise ValueError(f"token {token} was sampled, and sampling had not kept it")
        joined += [~token, *others]
    return np.array(joined, np.int32)


def chosen_sets(kept_tokens: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sets of the sampled tokens with these indices, int32, one after another, and their sizes, int64."""
    starts = np.flatnonzero(kept_tokens < 0)
    sizes = np.diff(starts, append=len(kept_tokens))[index]
    places = np.repeat(starts[index] - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
    found = kept_tokens[places]
    return np.where(found < 0, ~found, found), sizes
