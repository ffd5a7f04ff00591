"""The loops of `delta.py`, compiled by numba when they are first called, which takes a second.

numpy would need a dozen calls for each block, which take several times as long as reading the block.
"""

from __future__ import annotations

import numpy as np
from numba import njit

Index = np.uintp
"""Numbers of elements and words: with signed ones numba would look for negative ones, which count from the end."""


@njit(nogil=True)
def find_changes(
    new_words: np.ndarray,
    old_words: np.ndarray,
    new: np.ndarray,
    old: np.ndarray,
    block: int,
    limit_bytes: int,
    counts: np.ndarray,
    offsets: np.ndarray,
    values: np.ndarray,
) -> np.int64:
    """Find the elements that differ, block by block: their number in `counts`, their `offsets` in the block, `values`.

    The words are the same memory as the elements [N] in words of 8 bytes. Words are compared first, without a branch,
    and then the elements of those that differ. `offsets` and `values` have one entry more than there are elements.
    Returns how many elements differ, or -1 as soon as the message would have `limit_bytes` or more.
    """
    per_word = Index(8 // new.itemsize)
    changed = np.empty(block // 8 * new.itemsize + 1, np.int32)
    found, size = Index(0), np.int64(0)
    for number in range(Index(len(counts))):
        start, stop = number * Index(block), min((number + Index(1)) * Index(block), Index(len(new)))
        first_word, last_word = start // per_word, stop // per_word
        num_words, first = Index(0), found
        for word in range(last_word - first_word):
            changed[num_words] = word
            num_words += Index(new_words[first_word + word] != old_words[first_word + word])
        new_block, old_block = new[start:stop], old[start:stop]
        for i in range(num_words):
            offset = Index(changed[i]) * per_word
            for k in range(per_word):
                offsets[found] = offset + k
                values[found] = new_block[offset + k]
                found += Index(new_block[offset + k] != old_block[offset + k])
        for offset in range((last_word - first_word) * per_word, stop - start):  # elements that fill no word
            offsets[found] = offset
            values[found] = new_block[offset]
            found += Index(new_block[offset] != old_block[offset])
        num = np.int64(found - first)
        counts[number] = num
        size += 4 + num * new.itemsize + min(2 * num, (np.int64(stop - start) + 7) // 8)
        if size >= limit_bytes:
            return np.int64(-1)
    return np.int64(found)


@njit(nogil=True)
def apply_changes(
    elements: np.ndarray, block: int, counts: np.ndarray, offsets: np.ndarray, values: np.ndarray
) -> bool:
    """Write the values to the elements, which `counts` and `offsets` describe as above; False if an offset is wrong."""
    found = Index(0)
    for number in range(Index(len(counts))):
        start = number * Index(block)
        size = min(Index(block), Index(len(elements)) - start)
        for _ in range(counts[number]):
            if offsets[found] >= size:
                return False
            elements[start + Index(offsets[found])] = values[found]
            found += Index(1)
    return True
