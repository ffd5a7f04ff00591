import numpy as np
import pytest
import torch

from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.config.padding import PaddingRule
from megatron_bapo.metrics.values import scalars
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.entropy_change import predicted_entropy_change
from megatron_bapo.trainer.micro_batches import Example, to_micro_batch
from megatron_bapo.trainer.update_metrics import read
from megatron_bapo.trainer.worker import Scores

LOW, HIGH, DUAL = torch.tensor(0.8), torch.tensor(1.2), 2.5
ALONE = Axis(None, rank=0, size=1)  # pyright: ignore[reportArgumentType]


def predicted(
    log_ratios: list[float], corrections: list[float] | None, advantage: float = 1.0, clip_ratio_c: float | None = None
) -> dict[str, float]:
    num = len(log_ratios)
    trajectory = Trajectory(
        prompt_token_ids=np.array([3], np.int32),
        response_token_ids=np.arange(num, dtype=np.int32),
        behaviour_log_probs=np.full(num, -1.0, np.float32),
        version_spans=(VersionSpan(0, num),),
        finish_reason="stop",
        text="",
    )
    weights = None if corrections is None else np.array(corrections, np.float32)
    example = Example(trajectory, advantage=advantage, weight=0.5, correction_weights=weights)
    micro_batch = to_micro_batch([example], PaddingRule(), ALONE, torch.device("cpu"))
    scores = Scores(torch.tensor(log_ratios) - 1.0, torch.full((num,), 2.0))
    return scalars(read([predicted_entropy_change(micro_batch, scores, LOW, HIGH, clip_ratio_c)])[0])


def test_tokens_that_rollout_correction_rejects_are_excluded_from_the_prediction() -> None:
    found = predicted([0.1, 5.0, -0.1], corrections=[1.0, 0.0, 1.0])
    assert found == predicted([0.1, -0.1], corrections=None)
    assert found != predicted([0.1, 5.0, -0.1], corrections=None)


@pytest.mark.parametrize("clip_ratio_c", [None, DUAL])
@pytest.mark.parametrize("corrections", [None, [0.7, 0.0, 0.4, 2.0, 1.0]])
@pytest.mark.parametrize("advantage", [0.8, -1.5])
def test_the_prediction_has_the_gradient_of_the_loss(
    advantage: float, corrections: list[float] | None, clip_ratio_c: float | None
) -> None:
    log_ratios = torch.tensor([-0.9, -0.1, 0.1, 0.6, 1.2], dtype=torch.float64)
    log_probs = (log_ratios - 1.0).requires_grad_()
    tokens = LossTokens(
        behaviour_log_probs_T=torch.full_like(log_ratios, -1.0),
        advantages_T=torch.full_like(log_ratios, advantage),
        weights_T=torch.full_like(log_ratios, 0.5),
        correction_T=None if corrections is None else torch.tensor(corrections, dtype=torch.float64),
    )
    settings = AlgorithmConfig(objective="ppo", clip_ratio_c=clip_ratio_c)
    policy_loss(log_probs, torch.zeros_like(log_probs), tokens, LOW, HIGH, settings).backward()
    assert log_probs.grad is not None
    change = (log_probs.grad * (log_probs + 2.0)).detach()  # of each token, whose state has an entropy of 2
    num = len(log_ratios) if corrections is None else sum(weight != 0 for weight in corrections)
    found = predicted(log_ratios.tolist(), corrections, advantage, clip_ratio_c)
    expected = (change * log_probs.detach().exp()).sum() / (0.5 * num), change.sum() / (0.5 * num)
    names = "actor/entropy_clip_rule/predicted", "actor/entropy_clip_rule/predicted_as_printed"
    assert [found[name] for name in names] == pytest.approx([value.item() for value in expected], rel=1e-5)
