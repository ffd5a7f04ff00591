from __future__ import annotations

import math

import pytest
import torch

from megatron_bapo.algorithm.kl import kl_estimate
from megatron_bapo.config.algorithm import KlType

POLICY, REFERENCE = ([0.5, 0.3, 0.15, 0.05], [0.4, 0.2, 0.3, 0.1])
"""Two distributions; their exact divergence is what the estimates estimate."""
KINDS: tuple[KlType, ...] = ("k1", "k2", "k3")


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_match_the_formula_token_by_token(kind: KlType) -> None:
    current = torch.linspace(-3, -0.1, 12, dtype=torch.float64, requires_grad=True)
    reference = torch.linspace(-0.5, -2.0, 12, dtype=torch.float64)
    estimates = kl_estimate(kind, current, reference)
    estimates.sum().backward()
    for log_p, log_q, found, slope in zip(
        current.tolist(),
        reference.tolist(),
        estimates.tolist(),
        current.grad.tolist(),
        strict=True,  # pyright: ignore
    ):
        x = log_p - log_q
        expected = {"k1": (x, 1.0), "k2": (x * x / 2, x), "k3": (math.exp(-x) - 1 + x, 1 - math.exp(-x))}[kind]
        assert (found, slope) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_mean_over_the_policys_own_tokens_is_the_divergence(kind: KlType) -> None:
    policy, reference = torch.tensor([POLICY, REFERENCE], dtype=torch.float64)
    exact = sum(p * math.log(p / q) for p, q in zip(POLICY, REFERENCE, strict=True))
    assert (policy * kl_estimate(kind, policy.log(), reference.log())).sum().item() == pytest.approx(exact, rel=1e-12)


def test_as_a_loss_k2_has_the_divergences_gradient_k1_none_and_k3_that_of_the_reverse() -> None:
    """Exact means over the vocabulary, through a softmax, as if every token had been sampled in proportion."""
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    reference = torch.tensor(REFERENCE, dtype=torch.float64)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, logits)[0]

    def of(kind: KlType) -> torch.Tensor:
        log_probs = logits.log_softmax(0)
        return gradient((log_probs.exp().detach() * kl_estimate(kind, log_probs, reference.log())).sum())

    log_probs = logits.log_softmax(0)
    forward = gradient((log_probs.exp() * (log_probs - reference.log())).sum())
    reverse = gradient((reference * (reference.log() - logits.log_softmax(0))).sum())
    torch.testing.assert_close(of("k1"), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(of("k2"), forward)
    torch.testing.assert_close(of("k3"), reverse)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_one_side_rules_out_keeps_the_estimate_finite(kind: KlType) -> None:
    estimates = kl_estimate(kind, torch.tensor([-math.inf, -1.0]), torch.tensor([-1.0, -math.inf]))
    assert estimates.isfinite().all()
