import math

import numpy as np
import pytest
import torch

from megatron_bapo.config.padding import PaddingRule
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.micro_batches import Example, MicroBatch, to_micro_batch
from megatron_bapo.trainer.token_reservoir import TokenReservoir


class OneProcess:
    """The fields of ParallelGroups that the reservoir reads, for a single rank."""

    is_last_stage = True
    data_context = pipeline = Axis(None, 0, 1)  # pyright: ignore[reportArgumentType]


def example(length: int, advantage: float) -> Example:
    """Create an example whose behaviour log-probs are -1, -2, ..."""
    trajectory = Trajectory(
        prompt_token_ids=np.array([1], np.int32),
        response_token_ids=np.arange(length, dtype=np.int32),
        behaviour_log_probs=-np.arange(1, length + 1, dtype=np.float32),
        version_spans=(VersionSpan(0, length),),
        finish_reason="stop",
        text="",
    )
    return Example(trajectory, advantage, 1.0)


EXAMPLES = [example(3, 1.0), example(5, -2.0), example(4, 0.0)]


def lay_out(examples: list[Example], rank: int = 0, size: int = 1) -> MicroBatch:
    axis = Axis(None, rank, size)  # pyright: ignore[reportArgumentType]
    return to_micro_batch(examples, PaddingRule(2 * size if size > 1 else 1, 1), axis, torch.device("cpu"))


def add(reservoir: TokenReservoir, batch: MicroBatch, log_ratio: float = 0.5) -> None:
    reservoir.add(batch, batch.behaviour_log_probs_N + log_ratio, -batch.behaviour_log_probs_N)


def gather(reservoir: TokenReservoir) -> dict[str, list[float]]:
    table = reservoir.gather(OneProcess())  # pyright: ignore[reportArgumentType]
    return {name: column.tolist() for name, column in table.items()}


def test_the_configured_number_of_tokens_of_each_update_is_kept_with_their_values():
    reservoir = TokenReservoir(7, seed=(1,))
    for _ in range(2):
        add(reservoir, lay_out(reservoir.choose(EXAMPLES)))

    table = gather(reservoir)

    assert table["update"] == [1.0] * 7 + [2.0] * 7
    assert table["log_ratio"] == pytest.approx([0.5] * 14)
    for prob, entropy in zip(table["prob"], table["entropy"], strict=True):
        assert prob == pytest.approx(math.exp(0.5 - entropy))
    assert set(table["advantage_sign"]) == {-1.0, 0.0, 1.0}


def test_an_update_without_examples_counts_as_one():
    reservoir = TokenReservoir(2, seed=(1,))
    assert reservoir.choose([]) == []
    add(reservoir, lay_out(reservoir.choose(EXAMPLES)))
    assert gather(reservoir)["update"] == [2.0, 2.0]


def test_all_tokens_are_kept_if_there_are_fewer_than_requested():
    reservoir = TokenReservoir(100, seed=(1,))
    add(reservoir, lay_out(reservoir.choose(EXAMPLES)))

    table = gather(reservoir)

    assert sorted(table["entropy"]) == sorted([*range(1, 4), *range(1, 6), *range(1, 5)])
    assert [table["advantage_sign"].count(sign) for sign in (1.0, -1.0, 0.0)] == [3, 5, 4]


@pytest.mark.parametrize("split", [[EXAMPLES[:1], EXAMPLES[1:]], [EXAMPLES[::-1]]], ids=["two", "turned round"])
def test_the_choice_depends_on_neither_micro_batches_nor_context_parallel_ranks(split):
    def choose() -> tuple[TokenReservoir, dict[int, Example]]:
        reservoir = TokenReservoir(5, seed=(3,))
        return reservoir, dict(zip(map(id, EXAMPLES), reservoir.choose(EXAMPLES), strict=True))

    whole, chosen = choose()
    add(whole, lay_out(list(chosen.values())))
    parts, chosen = choose()
    batches = [lay_out([chosen[id(e)] for e in part], rank, 2) for part in split for rank in range(2)]
    for batch in batches:
        add(parts, batch)

    assert gather(parts) == gather(whole)


def test_the_choice_follows_the_seed_and_changes_with_the_update():
    reservoir, again, other = (TokenReservoir(5, seed=(seed,)) for seed in (1, 1, 2))
    first, second = (reservoir.choose(EXAMPLES) for _ in range(2))

    assert again.choose(EXAMPLES) == first != second
    assert other.choose(EXAMPLES) != first


def test_every_token_is_equally_likely():
    counts = np.zeros(12)
    for seed in range(600):
        marked = TokenReservoir(3, seed=(seed,)).choose(EXAMPLES)
        counts += np.concatenate([np.isin(range(n), e.recorded) for n, e in zip((3, 5, 4), marked, strict=True)])

    # 600 x 3 / 12 = 150 are expected, with a standard deviation of 10.6.
    assert counts.sum() == 1800
    assert np.abs(counts - 150).max() < 5 * 10.6


def test_a_repeated_pass_over_a_micro_batch_replaces_the_first():
    reservoir = TokenReservoir(4, seed=(1,))
    batch = lay_out(reservoir.choose(EXAMPLES))
    for log_ratio in (0.5, 0.25):
        add(reservoir, batch, log_ratio)

    assert gather(reservoir)["log_ratio"] == pytest.approx([0.25] * 4)


def test_no_tokens_are_kept_if_none_are_requested():
    reservoir = TokenReservoir(0, seed=(1,))
    add(reservoir, lay_out(reservoir.choose(EXAMPLES)))

    assert gather(reservoir) == {n: [] for n in ("update", "log_ratio", "prob", "entropy", "advantage_sign")}
