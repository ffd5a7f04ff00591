from collections import Counter
from typing import Literal

import numpy as np
import pytest

from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.replay_buffer import ReplayBuffer, staleness_metrics


def group(*versions: int, num_tokens: int = 2) -> Group:
    """Return a group of one trajectory with a span for each version."""
    size = num_tokens * len(versions)
    spans = tuple(VersionSpan(version, num_tokens) for version in versions)
    trajectory = Trajectory(
        np.ones(1, np.int32), np.ones(size, np.int32), np.zeros(size, np.float32), spans, "stop", "", 0.0
    )
    return Group(Prompt("p", (), "", ""), (trajectory,))


def buffer(
    serials: range,
    *,
    max_staleness: int = 3,
    max_reuse: int = 1,
    seed: int = 0,
    on_stale: Literal["wait", "drop"] = "wait",
) -> ReplayBuffer:
    filled = ReplayBuffer(max_staleness=max_staleness, max_reuse=max_reuse, seed=seed, on_stale=on_stale)
    for serial in reversed(serials):
        filled.add(serial, group(0))
    return filled


def test_batches_are_in_the_order_of_their_prompts_whichever_group_finished_first():
    filled = buffer(range(5))
    assert [[e.serial for e in filled.take(2, batch=i)] for i in range(2)] == [[0, 1], [2, 3]]
    assert [e.serial for e in filled.fresh()] == [4]


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
@pytest.mark.parametrize("max_reuse", [2, 3])
def test_each_group_is_used_up_to_max_reuse_times_and_each_batch_brings_new_ones(max_reuse: int, on_stale):
    filled, uses, serial = buffer(range(0), max_reuse=max_reuse, on_stale=on_stale), Counter(), 0
    for batch in range(30):
        needed = filled.num_fresh_needed(6)
        assert needed >= 6 // max_reuse
        for _ in range(needed):
            filled.add(serial, group(0))
            serial += 1
        taken = [entry.serial for entry in filled.take(6, batch=batch)]
        assert taken == sorted(set(taken))
        uses.update(taken)
    assert max(uses.values()) == max_reuse
    assert serial == pytest.approx(30 * 6 / max_reuse, rel=0.2)


def test_the_choice_of_reused_groups_depends_only_on_the_seed():
    def second_batch(seed: int) -> list[int]:
        filled = buffer(range(16), max_reuse=2, seed=seed, on_stale="drop")
        filled.take(8, batch=0)
        return [entry.serial for entry in filled.take(8, batch=1)]

    assert second_batch(0) == second_batch(0)
    assert len({tuple(second_batch(seed)) for seed in range(8)}) > 4


def test_a_group_is_as_old_as_its_oldest_token_and_is_evicted_beyond_max_staleness():
    filled = buffer(range(0), max_staleness=2)
    for serial, versions in enumerate([(0,), (0, 3), (1, 3), (3,)]):
        filled.add(serial, group(*versions))
    assert filled.evict(2) == []
    assert [entry.serial for entry in filled.evict(3)] == [0, 1]
    assert [entry.serial for entry in filled.fresh()] == [2, 3]
    assert filled.admits(1, 3)
    assert not filled.admits(0, 3)


@pytest.mark.parametrize(("num", "max_reuse"), [(6, 2), (6, 3), (5, 2), (7, 3)])
def test_with_wait_groups_are_used_in_consecutive_batches_and_none_is_too_old_for_its_last_use(num, max_reuse):
    filled = buffer(range(0), max_reuse=max_reuse, max_staleness=max_reuse - 1)
    used: dict[int, list[int]] = {}
    serial = 0
    for version in range(20):
        assert filled.evict(version) == []
        for _ in range(filled.num_fresh_needed(num)):
            filled.add(serial, group(version))
            serial += 1
        for entry in filled.take(num, batch=version):
            used.setdefault(entry.serial, []).append(version)
    complete = [versions for versions in used.values() if versions[0] <= 20 - max_reuse]
    assert all(versions == list(range(versions[0], versions[0] + len(versions))) for versions in complete)
    assert {len(versions) for versions in complete} == {1, max_reuse}
    assert sum(len(versions) == max_reuse for versions in complete) >= 17 * (
        (num - -(-num // max_reuse)) // (max_reuse - 1)
    )


def test_a_batch_waits_for_unfinished_groups_that_no_later_batch_could_use():
    """With max_staleness=2 and batches of 2 at version 5, tokens of version 3 are used now or never."""
    filled = buffer(range(0), max_staleness=2)
    for serial, version in enumerate((5, 5)):
        filled.add(serial, group(version))
    assert filled.must_wait(2, [3], 5)
    assert not filled.must_wait(2, [4, 4], 5)  # they fit into the next batch
    assert filled.must_wait(2, [4, 4, 4], 5)
    assert filled.must_wait(2, [4, 4, 5, 3], 5)
    for serial in (2, 3):
        filled.add(serial, group(3))
    assert not filled.must_wait(2, [3, 3], 5)  # waiting does not help: the batch is full of groups that are as old
    assert [entry.serial for entry in filled.take(2, batch=0)] == [2, 3]


def test_with_drop_a_batch_never_waits():
    filled = buffer(range(2), max_staleness=1, on_stale="drop")
    assert not filled.must_wait(2, [0, 0, 0], 1)


def test_ages_are_counted_over_tokens():
    batch = [group(5), group(3, 4, 5, num_tokens=4)]
    assert scalars(staleness_metrics(batch, policy_version=5, max_staleness=3)) == {
        "rollout/staleness/mean": pytest.approx((4 * 1 + 4 * 2) / 14),
        "rollout/staleness/max": 2,
        "rollout/staleness/mixed_responses": 0.5,
        "rollout/staleness/age_0": pytest.approx(6 / 14),
        "rollout/staleness/age_1": pytest.approx(4 / 14),
        "rollout/staleness/age_2": pytest.approx(4 / 14),
        "rollout/staleness/age_3": 0.0,
    }
