from itertools import pairwise

import pytest

from megatron_bapo.config.rollout import KV_OVERCOMMIT
from megatron_bapo.planning.batch_course import NUM_INTERVALS, batch_course, interval_tokens
from megatron_bapo.planning.response_lengths import Lengths, lengths_of
from tests.unit.planning.examples import recipe

PLAN = recipe("qwen2.5-7b_8gpus", "rollout.max_response_length=8192")
LENGTHS = lengths_of(PLAN.config, PLAN.assumptions)
N = 16
ROOM = 10**9


@pytest.mark.parametrize("kv_tokens", [100_000, 400_000, ROOM])
@pytest.mark.parametrize("max_num_seqs", [20, 1000])
def test_every_response_is_generated_to_its_end(kv_tokens: int, max_num_seqs: int) -> None:
    course = batch_course(LENGTHS, N, 256, kv_tokens, max_num_seqs)
    generated = interval_tokens(LENGTHS) * sum(each.running for each in course)
    assert generated == pytest.approx(256 * LENGTHS.mean_response, rel=0.01)
    assert max(each.running for each in course) <= max_num_seqs
    assert max(each.tokens for each in course) <= kv_tokens


def test_with_room_for_all_the_responses_that_are_longer_run() -> None:
    course = batch_course(LENGTHS, N, 256, ROOM, 256)
    assert len(course) == NUM_INTERVALS
    for index, each in enumerate(course):
        reached = (index + 0.5) * interval_tokens(LENGTHS)
        assert each.running == pytest.approx(256 * LENGTHS.reaching(reached))
    tokens = [each.tokens / each.running for each in course]
    assert tokens == pytest.approx([tokens[0] + index * interval_tokens(LENGTHS) for index in range(NUM_INTERVALS)])


def test_at_first_the_router_sends_what_it_expects_to_fit() -> None:
    alike = Lengths(prompt=0.0, responses=(100,) * 64)
    assert batch_course(alike, 1, 40, 1000, 1000)[0].running == pytest.approx(KV_OVERCOMMIT * 1000 / 100)


def test_a_full_cache_stops_the_youngest_until_others_have_ended() -> None:
    """Of 15 responses of 100 tokens that start together, 10 fit to their end; the others continue after them."""
    alike = Lengths(prompt=0.0, responses=(100,) * 64)
    course = batch_course(alike, 1, 15, 1000, 1000)
    assert course[0].running == pytest.approx(15)
    assert course[NUM_INTERVALS - 1].running == pytest.approx(10, rel=0.01)
    assert course[-1].running < 10
    assert len(course) > NUM_INTERVALS


def test_the_seconds_of_a_batch_have_no_jump_as_the_cache_grows() -> None:
    seconds = [
        recipe("qwen2.5-32b_64gpus", f"rollout.gpu_memory_utilization={share / 100}").time.generation
        for share in range(45, 85, 5)
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert all(after > 0.8 * before for before, after in pairwise(seconds))
