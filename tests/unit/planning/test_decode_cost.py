from dataclasses import replace

import pytest

from megatron_bapo.planning.decode_cost import DecodeCost

COST = DecodeCost(
    overhead=2.0, weights=5.0, per_token=0.5, per_sequence=4.0, per_request=0.5, launches=9.0, latency=1.5
)
MIXTURE = replace(COST, experts=20.0, unrouted=0.9)


@pytest.mark.parametrize(("num_sequences", "num_tokens"), [(1, 0), (3, 0), (3, 10), (3, 1000), (7, 3)])
@pytest.mark.parametrize(("cost", "experts"), [(COST, 0.0), (MIXTURE, 20.0)])
@pytest.mark.parametrize("waits", [False, True])
def test_the_cost_of_many_steps_is_the_sum_of_single_steps(
    cost: DecodeCost, experts: float, num_sequences: int, num_tokens: int, waits: bool
):
    weights, host = 5.0 + experts * (1 - 0.9**num_sequences), 2.0 + 0.5 * num_sequences
    for num_steps in (1, 2, 5, 40):
        expected = 0.0
        for step in range(num_steps):
            reading = weights + 0.5 * (num_tokens + num_sequences * step)
            gpu = 1.5 + max(reading, 4.0 * num_sequences)
            expected += host + max(gpu, 9.0) if waits else max(gpu, host + 9.0)
        assert replace(cost, waits=waits).seconds(num_steps, num_sequences, num_tokens) == pytest.approx(expected)


def test_steps_cost_the_same_if_the_kv_cache_is_free():
    assert DecodeCost(2.0, 0.0, 0.0, 4.0).seconds(10, 3, 100) == pytest.approx(10 * 12.0)


@pytest.mark.parametrize("cost", [COST, MIXTURE])
def test_coarse_tokens_cost_as_much_as_the_tokens_they_represent(cost: DecodeCost):
    fine, coarse = cost.seconds(1600, 3, 800), cost.coarse(16).seconds(100, 3, 50)

    assert coarse == pytest.approx(fine, rel=0.02)
