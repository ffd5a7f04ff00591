import asyncio
from dataclasses import replace

import numpy as np

from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.hand_over import PART_BYTES, ResponseTexts, taken_apart


def group(index: int, *, length: int = 4, n: int = 2) -> Group:
    ids = np.full(length, index, np.int32)
    trajectory = Trajectory(ids[:1], ids, np.zeros(length, np.float32), (VersionSpan(0, length),), "stop", "")
    return Group(Prompt(f"p:{index}", (), "", "p"), tuple(replace(trajectory, text=f"{index}.{i}") for i in range(n)))


async def decode(token_ids: np.ndarray) -> str:
    return f"decoded {token_ids[0]}"


def texts(groups: list[Group]) -> list[list[str]]:
    return [[trajectory.text for trajectory in each.trajectories] for each in groups]


def test_of_dropped_texts_those_of_the_samples_are_restored():
    kept = ResponseTexts(decode, num_samples=2, keep_all=False)
    dropped = [kept.dropped(group(index)) for index in range(4)]
    assert texts(dropped) == [["", ""]] * 4
    restored = asyncio.run(kept.restored(dropped[:1], 0)) + asyncio.run(kept.restored(dropped[1:], 1))
    assert texts(restored) == [["decoded 0", ""], ["decoded 1", ""], ["", ""], ["", ""]]


def test_if_all_texts_are_kept_those_that_an_earlier_run_has_dropped_are_restored():
    kept = ResponseTexts(decode, num_samples=0, keep_all=True)
    assert texts([kept.dropped(group(3))]) == [["3.0", "3.1"]]
    saved = ResponseTexts(decode, num_samples=0, keep_all=False).dropped(group(5))
    assert texts(asyncio.run(kept.restored([group(3), saved], 0))) == [["3.0", "3.1"], ["decoded 5", "decoded 5"]]


def test_a_batch_is_taken_apart_in_order_and_leaves_the_list_empty():
    quarter = PART_BYTES // 8 // 8  # tokens of a response of which two fill a quarter of a part
    groups = [group(index, length=quarter) for index in range(6)]
    left, parts = [], []
    for start, part in taken_apart(groups):
        left.append(len(groups))
        parts.append((start, [each.prompt.prompt_id for each in part]))
    assert parts == [(0, ["p:0", "p:1", "p:2", "p:3"]), (4, ["p:4", "p:5"])]
    assert left == [2, 0]


def test_a_part_has_few_trajectories_if_they_are_short():
    groups = [group(index, n=16) for index in range(1024)]
    sizes = [sum(len(each.trajectories) for each in part) for _, part in taken_apart(groups)]
    assert sum(sizes) == 16_384
    assert max(sizes) <= 1024
