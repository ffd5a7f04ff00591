import pickle
from dataclasses import replace

import numpy as np
import pytest

from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.batch_header import BatchHeader, with_words, without_tokens, words
from megatron_bapo.trainer.scatter_batch import MESSAGE_WORDS, _bounds, _messages


def trajectory(length: int, *, is_masked: bool = False, reward: float = 0.1) -> Trajectory:
    mask = np.arange(length) % 3 != 1 if is_masked else None
    num = length if mask is None else int(mask.sum())
    return Trajectory(
        prompt_token_ids=np.arange(5, dtype=np.int32),
        response_token_ids=np.arange(length, dtype=np.int32),
        behaviour_log_probs=-np.arange(num, dtype=np.float32) / 3,
        version_spans=(VersionSpan(3, num - 1), VersionSpan(4, 1)),
        finish_reason="length" if is_masked else "stop",
        text="text",
        reward=reward,
        loss_mask=mask,
    )


BATCH = [trajectory(7), trajectory(32, is_masked=True), trajectory(33, is_masked=True, reward=np.pi), trajectory(64)]


TAUGHT = [replace(each, teacher_log_probs=each.behaviour_log_probs - 1) for each in BATCH]
KEPT = [replace(each, kept_tokens=-np.arange(1, 2 * each.num_sampled, dtype=np.int32)) for each in TAUGHT]
NAMES = (
    "prompt_token_ids",
    "response_token_ids",
    "behaviour_log_probs",
    "loss_mask",
    "teacher_log_probs",
    "kept_tokens",
)


@pytest.mark.parametrize("batch", [BATCH, TAUGHT, KEPT], ids=["plain", "with-a-teachers-log-probs", "with-kept-tokens"])
def test_trajectories_are_restored_bit_by_bit_from_their_header_and_their_words(batch: list[Trajectory]):
    header = BatchHeader.of(batch)
    assert header.num_words_B.tolist() == [sum(map(len, words(each))) for each in batch]
    for each, empty in zip(batch, header.trajectories(), strict=True):
        found = with_words(empty, np.concatenate(words(each)))
        for name in NAMES:
            ours, theirs = getattr(found, name), getattr(each, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes())
        assert (found.version_spans, found.reward) == (each.version_spans, each.reward)
        assert (found.finish_reason, found.text) == (each.finish_reason, "")


def test_placeholders_have_the_lengths_of_what_they_replace_and_no_memory():
    for each, empty in zip(KEPT, BatchHeader.of(KEPT).trajectories(), strict=True):
        assert empty.kept_tokens is not None
        assert (empty.kept_tokens.strides, len(empty.kept_tokens)) == ((0,), 2 * each.num_sampled - 1)
        for placeholder in (empty.teacher_log_probs, without_tokens(each).teacher_log_probs):
            assert placeholder is not None
            assert (placeholder.strides, len(placeholder)) == ((0,), each.num_sampled)
        assert empty.num_sampled == each.num_sampled == without_tokens(each).num_sampled
        assert len(empty.response_token_ids) == len(each.response_token_ids)
        assert empty.behaviour_log_probs.strides == empty.response_token_ids.strides == (0,)
        assert np.isnan(empty.behaviour_log_probs).all()
        assert (empty.loss_mask is None) == (each.loss_mask is None)


def test_a_header_takes_few_bytes_for_a_trajectory_of_any_length():
    long = [trajectory(20_000, is_masked=True), trajectory(50_000)] * 500
    assert len(pickle.dumps(BatchHeader.of(long))) < 50 * len(long)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([1, 2, 3], [(0, 6)]),
        ([MESSAGE_WORDS, 1], [(0, MESSAGE_WORDS), (MESSAGE_WORDS, MESSAGE_WORDS + 1)]),
        ([1, 3 * MESSAGE_WORDS], [(0, 1), (1, 3 * MESSAGE_WORDS + 1)]),
    ],
)
def test_messages_have_whole_trajectories(sizes: list[int], expected: list[tuple[int, int]]):
    assert _bounds(np.array(sizes, np.int64)) == expected


def test_messages_share_the_memory_of_the_largest_one():
    batch = [trajectory(MESSAGE_WORDS // 3, is_masked=index == 1) for index in range(7)] + [trajectory(9)]
    sizes, found, places = BatchHeader.of(batch).num_words_B, [], set()
    for message in _messages(batch, sizes):
        places.add(message.data_ptr())
        found.append(message.numpy().copy())

    assert len(found) > 3
    assert len(places) == 1
    expected = [array for each in batch for array in words(each)]
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(expected))
