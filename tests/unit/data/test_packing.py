import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bapo.data.packing import cost, pack
from megatron_bapo.errors import UserError


def rank_costs(lengths: list[int], ranks: list[list[list[int]]]) -> list[float]:
    return [sum(cost(lengths[index]) for micro_batch in rank for index in micro_batch) for rank in ranks]


@given(data=st.data(), num_ranks=st.integers(1, 5), per_rank=st.integers(1, 12), max_tokens=st.integers(20, 60))
def test_every_trajectory_once_in_equally_many_filled_micro_batches(data, num_ranks, per_rank, max_tokens):
    num = num_ranks * per_rank
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=num, max_size=num))
    ranks = pack(lengths, max_tokens, num_ranks)
    micro_batches = list(itertools.chain(*ranks))
    assert len(ranks) == num_ranks
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(itertools.chain(*micro_batches)) == list(range(num))
    assert all(micro_batches)
    assert all(sum(lengths[index] for index in micro_batch) <= max_tokens for micro_batch in micro_batches)
    assert ranks == pack(lengths, max_tokens, num_ranks)


def test_micro_batches_are_filled_and_ranks_balanced_on_long_tailed_lengths():
    generator = random.Random(0)
    lengths = [min(8192, int(generator.lognormvariate(6.5, 1.0)) + 1) for _ in range(512)]
    ranks = pack(lengths, max_tokens=16384, num_ranks=8)
    lower_bound = -(-sum(lengths) // (16384 * 8))
    assert len(ranks[0]) <= lower_bound + 1
    costs = rank_costs(lengths, ranks)
    assert max(costs) / min(costs) < 1.02


def test_long_trajectories_weigh_more_than_their_tokens():
    lengths = [16000, 4000, 4000, 4000, 4000]
    assert pack(lengths, max_tokens=40000, num_ranks=2) == [[[0]], [[1, 2, 3, 4]]]


def test_one_long_trajectory_fills_its_micro_batch_exactly():
    assert pack([10, 4, 6], max_tokens=10, num_ranks=1) == [[[0], [1, 2]]]


def test_a_trajectory_over_the_budget_names_length_key_and_way_out():
    with pytest.raises(
        UserError, match=r"has 11 tokens .*trainer\.max_tokens_per_gpu=10; raise max_tokens_per_gpu to at"
    ):
        pack([3, 11], max_tokens=10, num_ranks=1)


@pytest.mark.parametrize("lengths", [[], [5, 5, 5]])
def test_fewer_trajectories_than_ranks_are_refused(lengths):
    with pytest.raises(UserError, match=f"{len(lengths)} trajectories cannot be spread over 4 data-parallel ranks"):
        pack(lengths, max_tokens=10, num_ranks=4)


def test_a_number_that_cannot_be_split_evenly_is_refused():
    with pytest.raises(UserError, match="3 trajectories with 30 tokens do not fit into equally many micro-batches"):
        pack([10, 10, 10], max_tokens=10, num_ranks=2)
