"""On-policy distillation against its formula in Python floats and against the exact divergence over a vocabulary."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss, policy_statistics
from megatron_bapo.config.algorithm import AlgorithmConfig, DistillationConfig

MAX_RATIO, COEF = 1.5, 0.3
DISTILLATION = DistillationConfig(teacher=Path("teacher"), coef=COEF, max_ratio=MAX_RATIO)
DISTILL = AlgorithmConfig(objective="distill", distillation=DISTILLATION)
LOW, HIGH = torch.tensor(0.8, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64)


def batch() -> tuple[Tensor, LossTokens]:
    """Return current log-probs and the other inputs of 50 tokens, float64."""
    generator = torch.Generator().manual_seed(1)
    behaviour, advantages, weights, teacher, noise = torch.randn(5, 50, generator=generator, dtype=torch.float64)
    behaviour = -3 * behaviour.abs()
    tokens = LossTokens(behaviour, advantages, weights.abs(), teacher_log_probs_T=-3 * teacher.abs())
    return (behaviour + 0.7 * noise).requires_grad_(), tokens


def gradient(current: Tensor, tokens: LossTokens, settings: AlgorithmConfig) -> Tensor:
    loss = policy_loss(current, torch.zeros_like(current), tokens, LOW, HIGH, settings)
    (found,) = torch.autograd.grad(loss, current)
    return found


def test_each_token_is_weighted_by_its_truncated_ratio_and_its_log_ratio_to_the_teacher() -> None:
    current, tokens = batch()
    columns = (current, tokens.behaviour_log_probs_T, tokens.teacher_log_probs_T, tokens.weights_T)
    expected = [
        COEF * weight * min(math.exp(log_p - behaviour), MAX_RATIO) * (log_p - teacher)
        for log_p, behaviour, teacher, weight in zip(
            *(column.tolist() for column in columns if column is not None), strict=True
        )
    ]
    assert gradient(current, tokens, DISTILL).tolist() == pytest.approx(expected, rel=1e-12)


def test_tokens_of_an_older_policy_have_the_gradient_of_the_exact_reverse_kl() -> None:
    """Enumerate every token of 20 distributions, weighted by the probability that the older policy samples it."""
    torch.manual_seed(2)
    logits, older, teacher = 1.5 * torch.randn(3, 20, 8, dtype=torch.float64)
    logits.requires_grad_()
    log_p, log_b, log_q = (each.log_softmax(-1) for each in (logits, older, teacher))
    exact = (log_p.exp() * (log_p - log_q)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)

    tokens = LossTokens(
        log_b.flatten(), torch.zeros(160), log_b.exp().flatten(), teacher_log_probs_T=log_q.detach().flatten()
    )
    without_truncation = DISTILLATION.model_copy(update={"coef": 1.0, "max_ratio": 1e12})
    settings = DISTILL.model_copy(update={"distillation": without_truncation})
    loss = policy_loss(log_p.flatten(), torch.zeros(160), tokens, LOW, HIGH, settings)
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert (log_p - log_b).exp().max() > 10


def test_the_gradient_of_a_policy_that_equals_its_teacher_is_zero_whatever_policy_sampled_the_tokens() -> None:
    current, tokens = batch()
    tokens = replace(tokens, teacher_log_probs_T=current.detach())
    assert not gradient(current, tokens, DISTILL).any()


@pytest.mark.parametrize("objective", ["bapo", "ppo", "gspo", "cispo", "sapo"])
def test_the_term_adds_to_every_other_objective(objective: str) -> None:
    current, tokens = batch()
    if objective == "gspo":
        tokens = replace(tokens, sequence_log_ratio_T=torch.linspace(-0.3, 0.3, 50, dtype=torch.float64))
    tokens = replace(tokens, correction_T=torch.linspace(0.0, 2.0, 50, dtype=torch.float64))
    alone = AlgorithmConfig.model_validate({"objective": objective})
    both = alone.model_copy(update={"distillation": DISTILLATION})
    parts = gradient(current, tokens, alone), gradient(current, tokens, DISTILL)
    torch.testing.assert_close(gradient(current, tokens, both), sum(parts), rtol=1e-12, atol=1e-14)
    assert all(part.any() and part[0] == 0 for part in parts)


def test_a_token_without_a_teachers_log_prob_is_dropped_from_the_term_and_counted() -> None:
    current, tokens = batch()
    assert tokens.teacher_log_probs_T is not None
    expected = gradient(current, tokens, DISTILL)
    teacher = tokens.teacher_log_probs_T.clone()
    teacher[3], teacher[4] = math.nan, -math.inf
    found = gradient(current, replace(tokens, teacher_log_probs_T=teacher), DISTILL)
    assert found[3] == 0
    ratio = min(math.exp(current[4].item() - tokens.behaviour_log_probs_T[4].item()), MAX_RATIO)
    assert found[4].item() == pytest.approx(COEF * tokens.weights_T[4].item() * ratio * 20.0, rel=1e-12)
    kept = [index for index in range(50) if index not in (3, 4)]
    assert found[kept].equal(expected[kept])
    sums = policy_statistics(current.detach(), replace(tokens, teacher_log_probs_T=teacher), LOW, HIGH, DISTILL)
    assert (sums.num_tokens.item(), sums.num_dropped.item(), sums.num_teacher_dropped.item()) == (49, 1, 0)
    penalized = DISTILL.model_copy(update={"kl_loss_coef": 0.1})
    both = replace(tokens, teacher_log_probs_T=teacher, reference_log_probs_T=tokens.behaviour_log_probs_T)
    with_kl, without = (
        policy_loss(current, torch.zeros_like(current), both, LOW, HIGH, settings) for settings in (penalized, DISTILL)
    )
    kl_loss = policy_statistics(current.detach(), both, LOW, HIGH, penalized).kl_loss
    assert (with_kl - without).item() == pytest.approx(0.1 * kl_loss.item(), rel=1e-9)
    bapo = AlgorithmConfig(distillation=DISTILLATION)
    assert gradient(current, replace(tokens, teacher_log_probs_T=teacher), bapo)[3] != 0
    sums = policy_statistics(current.detach(), replace(tokens, teacher_log_probs_T=teacher), LOW, HIGH, bapo)
    assert (sums.num_tokens.item(), sums.num_dropped.item(), sums.num_teacher_dropped.item()) == (50, 0, 1)
    assert sums.teacher_kl.isfinite()


@pytest.mark.parametrize("settings", [DISTILL, AlgorithmConfig(distillation=DISTILLATION)], ids=["distill", "bapo"])
def test_the_divergence_of_the_sampled_tokens_is_reported(settings: AlgorithmConfig) -> None:
    current, tokens = batch()
    assert tokens.teacher_log_probs_T is not None
    sums = policy_statistics(current.detach(), tokens, LOW, HIGH, settings)
    expected = (current - tokens.teacher_log_probs_T).sum().item()
    assert sums.teacher_kl.item() == pytest.approx(expected, rel=1e-12)


def test_the_advantages_of_distillation_are_those_towards_the_teacher() -> None:
    """Count tokens that the teacher prefers, and tokens whose ratio is truncated."""
    current, tokens = batch()
    assert tokens.teacher_log_probs_T is not None
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in DISTILL.fixed_bounds)
    sums = policy_statistics(current.detach(), tokens, low, high, DISTILL)
    preferred = current < tokens.teacher_log_probs_T
    truncated = (current - tokens.behaviour_log_probs_T).exp() > MAX_RATIO
    assert sums.num_positive == preferred.sum()
    assert sums.num_clipped_high == truncated.sum() > 0
    assert sums.num_clipped_low == 0
