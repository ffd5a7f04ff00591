from typing import Any

import pytest
import torch

from megatron_bapo.config.algorithm import LossAggMode
from megatron_bapo.parallel.groups import Axis, ParallelGroups
from megatron_bapo.trainer.bound_scopes import micro_batch_bounds
from megatron_bapo.trainer.rollout_batch import minibatch
from megatron_bapo.trainer.worker import Scores, Worker
from tests.unit.config.examples import config
from tests.unit.trainer.test_token_reservoir import example, lay_out

START, END = (0.6, 1.2), (0.9, 3.0)
ALONE = Axis(None, rank=0, size=1)  # pyright: ignore[reportArgumentType]
GROUPS = ParallelGroups(*[ALONE] * 8, num_virtual_stages=1)


def bounds(mode: LossAggMode, weights: str) -> tuple[float, float]:
    """Find the bounds of five correct responses of 10 tokens and five wrong ones of 100, where every ratio is 1."""
    algorithm: dict[str, Any] = {"loss_agg_mode": mode, "clip_bounds": {"weights": weights}}
    settings = config(algorithm=algorithm)
    worker = Worker(settings, GROUPS, model=None, optimizer=None)  # pyright: ignore[reportArgumentType]
    examples = [example(length, advantage) for length, advantage in [(10, 1.0)] * 5 + [(100, -1.0)] * 5]
    micro_batch = lay_out(minibatch(settings, examples))
    scores = Scores(micro_batch.behaviour_log_probs_N, torch.zeros_like(micro_batch.weights_N))
    (low, high), _ = micro_batch_bounds(worker, micro_batch, scores)
    return round(low.item(), 6), round(high.item(), 6)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_if_the_loss_weights_all_tokens_equally_both_settings_give_the_same_bounds(mode: LossAggMode) -> None:
    assert bounds(mode, "token") == bounds(mode, "loss") == END


def test_the_bounds_balance_loss_weights_if_configured() -> None:
    assert bounds("seq-mean-token-mean", "token") == END
    assert bounds("seq-mean-token-mean", "loss") == START
