import math

import pytest
import torch

from megatron_bapo.model.vocab_parallel import OutputLayer, log_probs_and_entropy
from megatron_bapo.trainer.policy_update import loss_tokens
from megatron_bapo.trainer.worker import Worker
from tests.unit.config.examples import config
from tests.unit.trainer.test_bound_scopes import ALONE, GROUPS
from tests.unit.trainer.test_token_reservoir import example, lay_out


@pytest.mark.parametrize("unusable", [math.nan, -math.inf])
def test_one_unusable_log_prob_of_an_engine_does_not_affect_the_ratio_of_its_sequence(unusable: float) -> None:
    broken, whole = example(5, 1.0), example(4, -1.0)
    broken.trajectory.behaviour_log_probs[2] = unusable
    settings = config(algorithm__objective="gspo")
    worker = Worker(settings, GROUPS, model=None, optimizer=None)  # pyright: ignore[reportArgumentType]
    micro_batch = lay_out([broken, whole])
    generator = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH = torch.randn(9, 8, generator=generator), torch.randn(16, 8, generator=generator)
    outputs = hidden_NH, OutputLayer(weight_VH, 16, ALONE, chunk_size=4), torch.arange(9)
    log_probs_N, _ = log_probs_and_entropy(*outputs, temperature=1.0)
    tokens = loss_tokens(worker, micro_batch, log_probs_N)

    log_ratio_N = log_probs_N - micro_batch.behaviour_log_probs_N
    first = log_ratio_N[:5].clamp(max=20.0)
    expected = first[~first.isnan()].mean().item(), log_ratio_N[5:].mean().item()
    assert tokens.sequence_log_ratio_T is not None
    assert tokens.sequence_log_ratio_T.tolist() == pytest.approx([expected[0]] * 5 + [expected[1]] * 4, rel=1e-6)
