import json

import pytest

from megatron_bapo.rollout.response_lengths import NUM_AVERAGED, ResponseLengths

LIMIT = 32768


def after(lengths: ResponseLengths, num: int, num_tokens: int) -> ResponseLengths:
    for _ in range(num):
        lengths.add(num_tokens)
    return lengths


def test_the_expected_length_is_the_exact_mean_of_the_first_completions():
    lengths = after(after(ResponseLengths(), 3, 10), 1, 14)
    assert lengths.expected(LIMIT) == 11
    assert after(ResponseLengths(), 3 * NUM_AVERAGED, 3001).expected(LIMIT) == 3001


def test_the_expected_length_follows_a_policy_whose_responses_become_longer():
    lengths = after(ResponseLengths(), 5 * NUM_AVERAGED, 3000)
    assert after(lengths, NUM_AVERAGED, 12000).expected(LIMIT) == pytest.approx(12000 - 9000 * 0.368, rel=0.01)
    assert after(lengths, 4 * NUM_AVERAGED, 12000).expected(LIMIT) > 11900


@pytest.mark.parametrize("num", [0, 3, 500 * 8192])
def test_a_checkpoint_has_the_same_estimate_also_one_with_the_sum_over_all_completions(num: int):
    restored = ResponseLengths()
    restored.load_state_dict({"num": num, "num_tokens": num * 3000})
    again = ResponseLengths()
    again.load_state_dict(json.loads(json.dumps(restored.state_dict())))
    expected = 3000 if num else LIMIT // 4
    assert [each.expected(LIMIT) for each in (restored, again)] == [expected, expected]
    if num > NUM_AVERAGED:
        assert after(again, 5 * NUM_AVERAGED, 12000).expected(LIMIT) > 11900
