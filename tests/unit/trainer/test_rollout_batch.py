import dataclasses
from typing import Any

import numpy as np
import pytest

from megatron_bapo.config.algorithm import LossAggMode
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.rollout_batch import minibatch
from tests.unit.config.examples import config
from tests.unit.trainer.test_token_reservoir import example

MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


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
    assert found([truncated(3), truncated(5)], mode, overlong={"mode": "filter"}) == []
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


@pytest.mark.parametrize("mode", MODES)
def test_truncated_answers_are_left_out_of_the_denominators_where_they_are_filtered(mode: LossAggMode) -> None:
    whole = example(4, -1.0)
    assert found([truncated(3), whole], mode, overlong={"mode": "filter"}) == found([whole], mode)
    assert len(found([truncated(3), whole], mode)) == 2
