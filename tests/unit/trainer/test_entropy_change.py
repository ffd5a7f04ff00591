import numpy as np
import torch

from megatron_bapo.config.padding import PaddingRule
from megatron_bapo.metrics.values import scalars
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.trainer.entropy_change import predicted_entropy_change
from megatron_bapo.trainer.micro_batches import Example, to_micro_batch
from megatron_bapo.trainer.update_metrics import read
from megatron_bapo.trainer.worker import Scores

LOW, HIGH = torch.tensor(0.8), torch.tensor(1.2)
ALONE = Axis(None, rank=0, size=1)  # pyright: ignore[reportArgumentType]


def predicted(log_ratios: list[float], corrections: list[float] | None) -> dict[str, float]:
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
    example = Example(trajectory, advantage=1.0, weight=0.5, correction_weights=weights)
    micro_batch = to_micro_batch([example], PaddingRule(), ALONE, torch.device("cpu"))
    scores = Scores(torch.tensor(log_ratios) - 1.0, torch.full((num,), 2.0))
    return scalars(read([predicted_entropy_change(micro_batch, scores, LOW, HIGH)])[0])


def test_tokens_that_rollout_correction_rejects_are_excluded_from_the_prediction() -> None:
    found = predicted([0.1, 5.0, -0.1], corrections=[0.7, 0.0, 0.4])
    assert found == predicted([0.1, -0.1], corrections=None)
    assert found != predicted([0.1, 5.0, -0.1], corrections=None)
