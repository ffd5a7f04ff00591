import pytest

from megatron_bapo.planning.decode_cost import DecodeCost

COST = DecodeCost(overhead=2.0, weights=5.0, per_token=0.5, per_sequence=4.0)


@pytest.mark.parametrize(("num_sequences", "num_tokens"), [(1, 0), (3, 0), (3, 10), (3, 1000), (7, 3)])
def test_many_steps_take_as_long_as_each_of_them_after_the_other(num_sequences: int, num_tokens: int):
    for num_steps in (1, 2, 5, 40):
        expected = sum(
            2.0 + max(5.0 + 0.5 * (num_tokens + num_sequences * step), 4.0 * num_sequences) for step in range(num_steps)
        )
        assert COST.seconds(num_steps, num_sequences, num_tokens) == pytest.approx(expected)


def test_steps_of_a_cache_that_costs_nothing_are_all_alike():
    assert DecodeCost(2.0, 0.0, 0.0, 4.0).seconds(10, 3, 100) == pytest.approx(10 * (2.0 + 12.0))


def test_coarse_tokens_take_the_time_of_those_they_stand_for():
    fine, coarse = COST.seconds(1600, 3, 800), COST.coarse(16).seconds(100, 3, 50)

    assert coarse == pytest.approx(fine, rel=0.02)
