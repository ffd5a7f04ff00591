from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megatron_bapo.algorithm.kl import kl_estimate, of_current_policy
from megatron_bapo.config.algorithm import KlType

POLICY, REFERENCE = ([0.5, 0.3, 0.15, 0.05], [0.4, 0.2, 0.3, 0.1])
"""Two distributions, whose exact divergence is compared with the estimates."""
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
def test_the_mean_over_tokens_of_the_policy_is_the_divergence(kind: KlType) -> None:
    policy, reference = torch.tensor([POLICY, REFERENCE], dtype=torch.float64)
    exact = sum(p * math.log(p / q) for p, q in zip(POLICY, REFERENCE, strict=True))
    assert (policy * kl_estimate(kind, policy.log(), reference.log())).sum().item() == pytest.approx(exact, rel=1e-12)


def test_as_a_loss_k2_has_the_gradient_of_the_kl_k1_has_none_and_k3_that_of_the_reverse_kl() -> None:
    """Compare exact expectations over the vocabulary, through a softmax, with weights equal to the probabilities."""
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
def test_for_tokens_of_an_older_policy_the_weighted_estimate_has_value_and_gradient_of_the_kl(kind: KlType) -> None:
    """Enumerate every token, weighted by the probability that the older policy samples it."""
    logits = torch.tensor(POLICY, dtype=torch.float64).log().requires_grad_()
    reference, older = torch.tensor([REFERENCE, [0.05, 0.15, 0.3, 0.5]], dtype=torch.float64)
    log_probs = logits.log_softmax(0)
    exact = (log_probs.exp() * (log_probs - reference.log())).sum()
    estimate = kl_estimate(kind, log_probs, reference.log())
    found = (older * of_current_policy(kind, estimate, log_probs - older.log())).sum()
    gradients = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (exact, found, estimate.mean()))
    expected, ours, _ = gradients
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    if kind != "k2":
        assert found.item() == pytest.approx(exact.item(), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_probability_zero_under_one_policy_keeps_the_estimate_finite(kind: KlType) -> None:
    estimates = kl_estimate(kind, torch.tensor([-math.inf, -1.0]), torch.tensor([-1.0, -math.inf]))
    assert estimates.isfinite().all()


def test_k3_has_the_value_and_gradient_of_verls_low_var_kl() -> None:
    """Compare with verl's formula (`kl_penalty_forward` in `core_algos.py`) over log-ratios of -30 to 30 nats."""
    current = torch.linspace(-60, 0, 241, dtype=torch.float64)
    reference = torch.full_like(current, -30.0)

    def of(estimate: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = current.clone().requires_grad_()
        values = estimate(log_probs)
        return values.detach(), torch.autograd.grad(values.sum(), log_probs)[0]

    def low_var_kl(log_probs: torch.Tensor) -> torch.Tensor:
        difference = (reference - log_probs).clamp(min=-20, max=20)
        return (difference.exp() - difference - 1).clamp(min=-10, max=10)

    torch.testing.assert_close(of(lambda log_probs: kl_estimate("k3", log_probs, reference)), of(low_var_kl))


def test_one_token_far_below_the_reference_does_not_dominate_the_k3_gradient() -> None:
    log_probs = torch.full((10_000,), -1.1, dtype=torch.float64)
    log_probs[0] = -15.0
    log_probs.requires_grad_()
    kl_estimate("k3", log_probs, torch.full((10_000,), -1.0, dtype=torch.float64)).mean().backward()
    gradient = log_probs.grad
    assert gradient is not None
    assert gradient[0].abs() <= gradient[1:].abs().sum() / 100
