import math

import torch

from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import clipped_tokens
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.config.padding import PaddingRule
from megatron_bapo.data.rollout_samples import MASKED
from megatron_bapo.parallel.groups import Axis
from megatron_bapo.trainer.micro_batches import to_micro_batch
from megatron_bapo.trainer.token_trace import FIGURES, TokenTrace
from megatron_bapo.trainer.worker import Scores
from tests.unit.trainer.test_token_reservoir import EXAMPLES

ALONE = Axis(None, rank=0, size=1)  # pyright: ignore[reportArgumentType]


def test_a_micro_batch_is_traced_without_waiting_for_the_device() -> None:
    """A tensor on the meta device has no values, so that whatever depends on one raises."""
    trace = TokenTrace.of([example.trajectory for example in EXAMPLES], [1])
    batch = to_micro_batch(trace.mark(EXAMPLES, [0, 1, 2]), PaddingRule(), ALONE, torch.device("meta"))
    tokens = LossTokens(batch.behaviour_log_probs_N, batch.advantages_N, batch.weights_N)
    scores = Scores(torch.empty_like(tokens.advantages_T), torch.empty_like(tokens.advantages_T))
    bounds = torch.empty((), device="meta"), torch.empty((), device="meta")
    clipped = clipped_tokens(scores.log_probs_N, tokens, *bounds, AlgorithmConfig())
    trace.add(batch, scores, clipped, bounds, tokens.advantages_T != batch.advantages_N)
    assert len(batch.traced_K) == len(batch.traced_at_K) == 5


def test_masked_tokens_are_marked_as_such() -> None:
    trace = TokenTrace.of([example.trajectory for example in EXAMPLES], [1])
    batch = to_micro_batch(trace.mark(EXAMPLES, [0, 1, 2]), PaddingRule(), ALONE, torch.device("cpu"))
    tokens = LossTokens(batch.behaviour_log_probs_N, batch.advantages_N, batch.weights_N)
    bounds = torch.tensor(0.0), torch.tensor(math.inf)
    clipped = clipped_tokens(batch.behaviour_log_probs_N, tokens, *bounds, AlgorithmConfig())
    scores = Scores(batch.behaviour_log_probs_N, torch.zeros_like(batch.behaviour_log_probs_N))
    masked_N = torch.zeros_like(clipped.usable_T).index_fill(0, batch.traced_K[:2], True)
    trace.add(batch, scores, clipped, bounds, masked_N)
    ((_, values),) = trace._parts.values()
    assert values[FIGURES.index("marks")].tolist() == [MASKED, MASKED, 0.0, 0.0, 0.0]
