from typing import cast

import pytest
import torch
import torch.distributed as dist

from megatron_bapo.model.vocab_parallel import log_probs_and_entropy
from megatron_bapo.parallel.groups import Axis
from tests.tolerances import GRADIENT, LOG_PROB

NUM_TOKENS, VOCAB_SIZE = 37, 101
# An axis of one process calls no collective, so it needs no group.
ALONE = Axis(cast(dist.ProcessGroup, None), rank=0, size=1)


def logits_and_labels(scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_TV = scale * torch.randn(NUM_TOKENS, VOCAB_SIZE, generator=generator)
    return logits_TV, torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_values_and_gradient_are_those_of_a_float64_log_softmax(temperature):
    logits_TV, labels_T = logits_and_labels(scale=3.0)
    weights_T = torch.linspace(-2.0, 2.0, NUM_TOKENS)
    exact_TV = logits_TV.double().requires_grad_()
    all_log_probs_TV = torch.log_softmax(exact_TV / temperature, -1)
    exact_T = all_log_probs_TV.gather(1, labels_T[:, None]).squeeze(1)
    (exact_T * weights_T).sum().backward()

    logits_TV.requires_grad_()
    log_probs_T, entropy_T = log_probs_and_entropy(logits_TV, labels_T, temperature=temperature, tensor_axis=ALONE)
    (log_probs_T * weights_T).sum().backward()

    exact_entropy_T = -(all_log_probs_TV.exp() * all_log_probs_TV).sum(-1)
    torch.testing.assert_close(log_probs_T.double(), exact_T, atol=LOG_PROB, rtol=1e-6)
    torch.testing.assert_close(entropy_T.double(), exact_entropy_T, atol=LOG_PROB, rtol=1e-6)
    assert logits_TV.grad is not None
    assert exact_TV.grad is not None
    difference = (logits_TV.grad - exact_TV.grad).abs().max() / exact_TV.grad.abs().max()
    assert difference < GRADIENT


def test_logits_in_the_ten_thousands_stay_finite_and_right():
    logits_TV, labels_T = logits_and_labels(scale=1e4)
    exact_T = torch.log_softmax(logits_TV.double(), -1).gather(1, labels_T[:, None]).squeeze(1)

    logits_TV.requires_grad_()
    log_probs_T, entropy_T = log_probs_and_entropy(logits_TV, labels_T, temperature=1.0, tensor_axis=ALONE)
    log_probs_T.sum().backward()

    torch.testing.assert_close(log_probs_T.double(), exact_T, rtol=1e-6, atol=LOG_PROB)
    assert entropy_T.isfinite().all()
    assert logits_TV.grad is not None
    assert logits_TV.grad.isfinite().all()


def test_the_callers_logits_are_left_as_they_are():
    logits_TV, labels_T = logits_and_labels(scale=1.0)
    before_TV = logits_TV.clone()

    log_probs_and_entropy(logits_TV, labels_T, temperature=1.0, tensor_axis=ALONE)

    assert torch.equal(logits_TV, before_TV)


def test_entropy_reaches_from_zero_to_the_logarithm_of_the_vocabulary():
    certain_and_uniform_TV = torch.zeros(2, VOCAB_SIZE)
    certain_and_uniform_TV[0, 5] = 1e4

    _, entropy_T = log_probs_and_entropy(
        certain_and_uniform_TV, torch.tensor([5, 5]), temperature=1.0, tensor_axis=ALONE
    )

    expected_T = torch.tensor([0.0, float(VOCAB_SIZE)]).clamp(min=1.0).log()
    torch.testing.assert_close(entropy_T, expected_T, atol=LOG_PROB, rtol=1e-6)


def test_bfloat16_logits_get_a_bfloat16_gradient_and_float32_results():
    logits_TV, labels_T = logits_and_labels(scale=1.0)
    logits_TV = logits_TV.bfloat16().requires_grad_()

    log_probs_T, entropy_T = log_probs_and_entropy(logits_TV, labels_T, temperature=1.0, tensor_axis=ALONE)
    log_probs_T.sum().backward()

    assert log_probs_T.dtype == entropy_T.dtype == torch.float32
    assert logits_TV.grad is not None
    assert logits_TV.grad.dtype == torch.bfloat16
