import numpy as np
import pytest

from megatron_bapo.kept_tokens import chosen_sets, kept_tokens_of
from tests.kept_sets import kept_sets

LABELS = [5, 7, 0, 7, 99]


def test_sets_of_consecutive_tokens_are_one_after_another() -> None:
    found = kept_tokens_of([5, 7], [[2, 5, 9], {7}])
    assert (found.tolist(), found.dtype) == ([~5, 2, 9, ~7], np.int32)
    assert kept_tokens_of([], []).tolist() == []


@pytest.mark.parametrize("index", [[0, 1, 2, 3, 4], [1, 4], [3], []])
def test_the_sets_of_chosen_tokens_are_found_in_joined_arrays(index: list[int]) -> None:
    sets = kept_sets(LABELS, 100)
    joined = np.concatenate([kept_tokens_of(LABELS[:2], sets[:2]), kept_tokens_of(LABELS[2:], sets[2:])])

    token_ids, sizes = chosen_sets(joined, np.array(index, np.int64))

    found = np.split(token_ids, np.cumsum(sizes))[:-1]
    assert [sorted(each) for each in found] == [sorted(sets[i]) for i in index]
    assert [each[0] for each in found] == [LABELS[i] for i in index]


def test_a_token_that_was_not_kept_is_refused() -> None:
    with pytest.raises(ValueError, match="token 7 was sampled, and sampling had not kept it"):
        kept_tokens_of([5, 7], [[5], [5, 6]])
