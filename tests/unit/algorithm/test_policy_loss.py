from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from megatron_bapo.algorithm.policy_loss import (
    LossTokens,
    PolicyLossSums,
    policy_loss,
    policy_statistics,
    supervised_loss,
    token_weights,
)
from megatron_bapo.config.algorithm import AlgorithmConfig, LossAggMode

PPO = AlgorithmConfig(objective="ppo")
LOW, HIGH = torch.tensor(0.7, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64)
MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def loss_and_sums(
    current: Tensor, *columns: Tensor, settings: AlgorithmConfig = PPO, **optional: Tensor
) -> tuple[Tensor, PolicyLossSums]:
    """Compute the loss of tokens with the given behaviour log-probs, advantages and weights, and entropy 1."""
    tokens = LossTokens(*columns, **optional)
    loss = policy_loss(current, torch.ones_like(current), tokens, LOW, HIGH, settings)
    return loss, policy_statistics(current.detach(), tokens, LOW, HIGH, settings)


def random_tokens(num_tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return current and behaviour log-probs, advantages and weights."""
    generator = torch.Generator().manual_seed(0)
    behaviour = -torch.rand(num_tokens, generator=generator, dtype=dtype) * 3
    current = behaviour + torch.randn(num_tokens, generator=generator, dtype=dtype) * 0.5
    advantages = torch.randn(num_tokens, generator=generator, dtype=dtype)
    weights = torch.rand(num_tokens, generator=generator, dtype=dtype) + 0.1
    return current, behaviour, advantages, weights


def test_each_mode_weights_every_token_by_its_definition() -> None:
    lengths = [3, 1, 5]
    losses = torch.split(torch.arange(9, dtype=torch.float64), lengths)
    expected = {
        "token-mean": sum(t.sum() for t in losses) / 9,
        "seq-mean-token-sum": sum(t.sum() for t in losses) / 3,
        "seq-mean-token-mean": sum(t.mean() for t in losses) / 3,
        "seq-mean-token-sum-norm": sum(t.sum() for t in losses) / 3 / 100,
    }
    for mode in MODES:
        weights = token_weights(mode, torch.tensor(lengths), num_trajectories=3, num_tokens=9, max_response_length=100)
        weighted = (weights.repeat_interleave(torch.tensor(lengths)) * torch.cat(losses)).sum()
        assert weighted.item() == pytest.approx(float(expected[mode]), rel=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_a_micro_batch_are_those_in_the_whole_minibatch(mode: LossAggMode) -> None:
    lengths = torch.tensor([3, 1, 5, 2])
    counts = {"num_trajectories": 4, "num_tokens": 11, "max_response_length": 100}
    parts = [token_weights(mode, part, **counts) for part in lengths.split([1, 3])]
    assert torch.cat(parts).equal(token_weights(mode, lengths, **counts))


def test_loss_and_gradient_match_the_definition_token_by_token() -> None:
    current, behaviour, advantages, weights = random_tokens(200)
    current.requires_grad_()
    loss, sums = loss_and_sums(current, behaviour, advantages, weights)
    loss.backward()

    expected_loss, expected_gradient, num_clipped, contributions = 0.0, [], [0, 0], [0.0, 0.0]
    for log_p, log_q, a, w in zip(*(t.tolist() for t in (current, behaviour, advantages, weights)), strict=True):
        r = math.exp(log_p - log_q)
        clipped_high, clipped_low = a > 0 and r > 1.3, a < 0 and r < 0.7
        expected_loss -= w * a * (1.3 if clipped_high else 0.7 if clipped_low else r)
        expected_gradient.append(0.0 if clipped_high or clipped_low else -w * a * r)
        contributions[a < 0] += abs(a) * (1.3 if clipped_high else 0.7 if clipped_low else r)
        num_clipped[0] += clipped_high
        num_clipped[1] += clipped_low
    assert loss.item() == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(current.grad, torch.tensor(expected_gradient, dtype=torch.float64), rtol=1e-12, atol=0)
    assert [sums.num_clipped_high.item(), sums.num_clipped_low.item()] == num_clipped
    assert min(num_clipped) > 10
    assert [sums.positive_sum.item(), sums.negative_sum.item()] == pytest.approx(contributions, rel=1e-12)


def test_statistics_match_their_definitions() -> None:
    current, behaviour, advantages, weights = random_tokens(50)
    _, sums = loss_and_sums(current, behaviour, advantages, weights)
    log_ratio = current - behaviour
    assert (sums.num_tokens.item(), sums.num_dropped.item()) == (50, 0)
    assert sums.num_positive.item() == (advantages > 0).sum().item()
    assert sums.num_negative.item() == (advantages < 0).sum().item()
    assert sums.k1_kl.item() == pytest.approx((behaviour - current).sum().item())
    assert sums.k3_kl.item() == pytest.approx((log_ratio.exp() - 1 - log_ratio).sum().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[100], [1, 99], [30, 0, 50, 20]])
def test_loss_gradient_and_statistics_do_not_depend_on_the_split(sizes: list[int], dtype: torch.dtype) -> None:
    log_probs, behaviour, advantages, weights = random_tokens(100, dtype)
    tolerance = 8 * torch.finfo(dtype).eps

    def run(parts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        current = log_probs.clone().requires_grad_()
        micro_batches = zip(*(t.split(parts) for t in (current, behaviour, advantages, weights)), strict=True)
        results = [loss_and_sums(c, b, a, w) for c, b, a, w in micro_batches]
        torch.stack([loss for loss, _ in results]).sum().backward()
        assert current.grad is not None
        sums = torch.stack([torch.stack(dataclasses.astuple(stats)) for _, stats in results]).sum(dim=0)
        return torch.stack([loss.detach() for loss, _ in results]).sum(), current.grad, sums

    loss, gradient, sums = run([100])
    split_loss, split_gradient, split_sums = run(sizes)
    assert split_gradient.equal(gradient)
    torch.testing.assert_close(split_loss, loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(split_sums, sums, rtol=1e-12, atol=1e-12)


def test_unusable_tokens_contribute_nothing_and_gradients_stay_finite() -> None:
    nan, inf = math.nan, math.inf
    current = torch.tensor([-1.0, nan, -1.0, -inf, -1.0, -1.0, -inf], requires_grad=True)
    behaviour = torch.tensor([-1.0, -1.0, nan, -1.0, -1.0, -1.0, -inf])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, nan, inf, 1.0])
    loss, sums = loss_and_sums(current, behaviour, advantages, torch.ones(7))
    loss.backward()
    # The fourth token has a ratio of e^-20 after clamping, which is below the lower bound.
    assert loss.item() == pytest.approx(-1.0 + 0.7)
    assert current.grad is not None
    assert current.grad.equal(torch.tensor([-1.0, 0, 0, 0, 0, 0, 0]))
    assert (sums.num_tokens.item(), sums.num_dropped.item(), sums.num_clipped_low.item()) == (2, 5, 1)
    assert all(value.isfinite() for value in dataclasses.astuple(sums))


def test_a_huge_ratio_is_clamped_and_has_no_gradient() -> None:
    current = torch.tensor([100.0], requires_grad=True)
    loss, _ = loss_and_sums(current, torch.zeros(1), torch.tensor([-1.0]), torch.ones(1))
    loss.backward()
    assert loss.item() == pytest.approx(math.exp(20), rel=1e-6)
    assert current.grad is not None
    assert current.grad.item() == 0


def test_tokens_of_weight_zero_are_ignored() -> None:
    nan = math.nan
    loss, sums = loss_and_sums(
        torch.tensor([-1.0, nan, -0.5]), torch.tensor([-1.0, -1.0, -1.0]), torch.ones(3), torch.tensor([1.0, 0, 0])
    )
    assert (loss.item(), sums.num_tokens.item(), sums.num_dropped.item(), sums.k1_kl.item()) == (-1.0, 1, 0, 0)


def test_rejected_tokens_are_ignored_and_the_others_are_weighted_by_their_correction() -> None:
    columns = torch.tensor([-1.0, math.nan, -0.5]), torch.tensor([-1.0] * 3), torch.ones(3), torch.ones(3)
    current = columns[0].requires_grad_()
    correction = torch.tensor([0.25, 0.0, 0.0])
    settings = AlgorithmConfig(objective="ppo", entropy_coeff=0.125)
    loss, sums = loss_and_sums(current, *columns[1:], settings=settings, correction_T=correction)
    loss.backward()
    assert loss.item() == -0.25 - 0.125
    assert current.grad is not None
    assert current.grad.tolist() == [-0.25, 0.0, 0.0]
    assert (sums.num_tokens.item(), sums.num_dropped.item()) == (1, 0)


def test_entropy_bonus_and_kl_are_weighted_like_the_tokens_and_not_by_the_correction() -> None:
    current, behaviour, advantages, weights = random_tokens(60)
    reference, entropy, correction = current + 0.3, torch.rand(60, dtype=torch.float64), torch.rand(60) + 0.5
    tokens = LossTokens(behaviour, advantages, weights, correction.double(), reference)
    plain = policy_loss(current, entropy, tokens, LOW, HIGH, PPO)
    settings = AlgorithmConfig(objective="ppo", entropy_coeff=0.01, kl_loss_coef=0.5, kl_loss_type="k2")
    both = policy_loss(current, entropy, tokens, LOW, HIGH, settings)
    expected = 0.5 * weights.sum() * 0.3**2 / 2 - 0.01 * (weights * entropy).sum()
    torch.testing.assert_close(both - plain, expected, rtol=1e-10, atol=0)
    kl_loss = policy_statistics(current, tokens, LOW, HIGH, settings).kl_loss
    torch.testing.assert_close(kl_loss, weights.sum() * 0.3**2 / 2)


def test_an_unusable_token_affects_neither_kl_nor_entropy() -> None:
    current = torch.tensor([-1.0, math.nan], requires_grad=True)
    entropy = torch.tensor([1.0, math.nan], requires_grad=True)
    tokens = LossTokens(*torch.tensor([[-1.0, -1.0], [1.0, 1.0], [1.0, 1.0]]), reference_log_probs_T=current.detach())
    settings = AlgorithmConfig(objective="ppo", entropy_coeff=0.5, kl_loss_coef=0.5)
    loss = policy_loss(current, entropy, tokens, LOW, HIGH, settings)
    loss.backward()
    assert loss.item() == -1.5
    assert current.grad is not None
    assert entropy.grad is not None
    assert (current.grad.tolist(), entropy.grad.tolist()) == ([-1.0, 0.0], [-0.5, 0.0])


def test_a_token_that_the_reference_model_has_no_log_prob_of_keeps_its_objective_and_has_no_kl() -> None:
    current, behaviour, advantages, weights = random_tokens(3)
    current.requires_grad_()
    settings = AlgorithmConfig(objective="ppo", kl_loss_coef=0.5)
    reference = torch.tensor([-1.0, math.nan, -2.0], dtype=torch.float64)
    columns = behaviour, advantages, weights
    loss, sums = loss_and_sums(current, *columns, settings=settings, reference_log_probs_T=reference)
    (gradient,) = torch.autograd.grad(loss, current)
    plain, _ = loss_and_sums(current, *columns)
    (expected,) = torch.autograd.grad(plain, current)
    assert loss.isfinite()
    assert sums.kl_loss.isfinite()
    assert sums.num_kl_dropped == 1
    assert (gradient == expected).tolist() == [False, True, False]


def test_double_precision_bounds_keep_a_single_precision_loss() -> None:
    current, behaviour, advantages, weights = random_tokens(4, torch.float32)
    assert loss_and_sums(current, behaviour, advantages, weights)[0].dtype == torch.float32


def test_supervised_loss_is_the_weighted_negative_log_likelihood() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = supervised_loss(log_probs, torch.tensor([0.25, 0.5]))
    loss.backward()
    assert loss.item() == 1.25
    assert log_probs.grad is not None
    assert log_probs.grad.equal(torch.tensor([-0.25, -0.5]))
