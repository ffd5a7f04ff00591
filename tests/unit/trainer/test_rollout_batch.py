import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from megatron_bapo.config.algorithm import LossAggMode
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.rollout_batch import laid_out_together, minibatch, minibatches
from tests.unit.config.examples import config
from tests.unit.trainer.test_token_reservoir import example

MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

IN_TWOS = {"trainer__ppo_mini_batch_size": 2}


def truncated(length: int) -> Example:
    whole = example(length, 1.0)
    return dataclasses.replace(whole, trajectory=dataclasses.replace(whole.trajectory, finish_reason="length"))


def corrected(length: int, kept: int) -> Example:
    """With an importance weight of 2 for its first `kept` tokens; the others are rejected."""
    return dataclasses.replace(example(length, 1.0), correction_weights=np.where(np.arange(length) < kept, 2.0, 0.0))


def found(examples: list[Example], mode: LossAggMode, **algorithm: Any) -> list[Example]:
    return minibatch(config(algorithm={"loss_agg_mode": mode, **algorithm}), examples)


@pytest.mark.parametrize("mode", MODES)
def test_a_minibatch_without_a_token_to_learn_from_is_empty(mode: LossAggMode) -> None:
    assert found([], mode) == []
    assert found([corrected(3, kept=0), corrected(5, kept=0)], mode) == []


def test_rejected_tokens_leave_the_denominators_as_in_verl() -> None:
    """Sums over accepted tokens are divided by their number; sequences count with none, too."""
    examples = [corrected(4, kept=1), corrected(6, kept=3), corrected(5, kept=0), example(2, 1.0)]
    weights = {mode: [e.weight for e in found(examples, mode)] for mode in MODES}
    assert weights["token-mean"] == pytest.approx([1 / 6] * 4)
    assert weights["seq-mean-token-mean"][:2] == pytest.approx([1 / (4 * 1), 1 / (4 * 3)])
    assert weights["seq-mean-token-mean"][3] == pytest.approx(1 / (4 * 2))
    assert np.isfinite(weights["seq-mean-token-mean"][2])
    assert weights["seq-mean-token-sum"] == pytest.approx([1 / 4] * 4)
    assert weights["seq-mean-token-sum-norm"] == pytest.approx([1 / (4 * 100)] * 4)


def test_truncated_answers_are_left_out_of_the_updates_where_they_are_filtered() -> None:
    trajectories = [example(3, 1.0).trajectory, truncated(4).trajectory, truncated(5).trajectory]
    filtering = config(algorithm={"overlong": {"mode": "filter"}}, **IN_TWOS)
    assert minibatches(filtering, trajectories, step=0) == [[0], []]
    assert minibatches(config(**IN_TWOS), trajectories, step=0) == [[0, 1], [2]]


def test_each_later_pass_takes_the_trajectories_in_another_order() -> None:
    updates = minibatches(config(**IN_TWOS, trainer__ppo_epochs=3), [example(3, 1.0).trajectory] * 8, step=5)
    first, second, third = updates[:4], updates[4:8], updates[8:]
    assert first == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert first != second != third != first
    assert all(sorted(itertools.chain(*each)) == [*range(8)] for each in (second, third))


@pytest.mark.parametrize("algorithm", [{"behaviour_policy": "recomputed"}, {"kl_loss_coef": 0.1}])
def test_where_log_probs_are_computed_before_the_updates_all_are_laid_out_together(algorithm: dict[str, Any]) -> None:
    trajectories = [example(3, 1.0).trajectory] * 4
    assert laid_out_together(config(**IN_TWOS), trajectories, step=0) == [[0, 1], [2, 3]]
    scored = config(**IN_TWOS, algorithm=algorithm)
    assert laid_out_together(scored, trajectories, step=0) == [[0, 1], [2, 3], [0, 1, 2, 3]]
