"""Value and gradient of each objective against its formula, computed token by token with Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.objectives import sequence_log_ratios
from megatron_bapo.algorithm.policy_loss import policy_loss, policy_statistics, token_weights
from megatron_bapo.config.algorithm import AlgorithmConfig

LENGTHS = [7, 1, 12, 30]
LOW, HIGH, DUAL = 0.8, 1.28, 3.0


def tokens(*, per_sequence: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return current and behaviour log-probs and advantages, optionally with two of four sequences clipped entirely."""
    generator = torch.Generator().manual_seed(3)
    behaviour = -3 * torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64)
    current = behaviour + 0.7 * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    advantages = torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    if per_sequence:
        advantages, shifts = (
            torch.tensor(values, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
            for values in ([0.7, 1.1, -0.4, -1.3], [0.0, 2.0, -0.5, 0.0])
        )
        current = current + shifts
    return current.requires_grad_(), behaviour, advantages


def clipped(ratio: float, advantage: float) -> tuple[float, float]:
    if advantage >= 0:
        return (HIGH * advantage, 0.0) if ratio > HIGH else (ratio * advantage, ratio * advantage)
    return (LOW * advantage, 0.0) if ratio < LOW else (ratio * advantage, ratio * advantage)


def dual_clipped(ratio: float, advantage: float) -> tuple[float, float]:
    if advantage < 0 and ratio > DUAL:
        return DUAL * advantage, 0.0
    return clipped(ratio, advantage)


Formula = Callable[[float, float], tuple[float, float]]
"""(ratio, advantage) -> objective of the token and its derivative by the log-prob."""


@pytest.mark.parametrize(
    ("formula", "settings"),
    [
        (clipped, {"objective": "bapo"}),
        (clipped, {"objective": "ppo"}),
        (dual_clipped, {"objective": "ppo", "clip_ratio_c": DUAL}),
        (dual_clipped, {"objective": "bapo", "clip_ratio_c": DUAL}),
    ],
    ids=["bapo", "ppo", "ppo-dual", "bapo-dual"],
)
def test_the_clipped_surrogates(formula: Formula, settings: dict[str, Any]) -> None:
    current, behaviour, advantages = tokens()
    value, gradient = evaluate(current, LossTokens(behaviour, advantages, torch.ones_like(advantages)), settings)
    columns = zip(*(column.tolist() for column in (current, behaviour, advantages)), strict=True)
    pairs = [formula(math.exp(log_p - log_q), a) for log_p, log_q, a in columns]
    assert value == pytest.approx(sum(value for value, _ in pairs), rel=1e-12)
    assert gradient == pytest.approx([derivative for _, derivative in pairs], rel=1e-12)
    assert 10 < sum(derivative == 0 for _, derivative in pairs) < 40


def test_dual_clip_counts_the_tokens_that_it_clips() -> None:
    current, behaviour, advantages = tokens()
    batch = LossTokens(behaviour, advantages, torch.ones_like(advantages))
    settings = AlgorithmConfig(objective="ppo", clip_ratio_c=DUAL)
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    cut = [
        math.exp(x) > DUAL and a < 0 for x, a in zip((current - behaviour).tolist(), advantages.tolist(), strict=True)
    ]
    sums = policy_statistics(current, batch, low, high, settings)
    assert sums.num_clipped_dual.item() == sum(cut) > 0
    value, _ = evaluate(current, batch, {"objective": "ppo", "clip_ratio_c": DUAL})
    assert (sums.positive_sum - sums.negative_sum).item() == pytest.approx(value, rel=1e-6)


def test_cispo_weights_the_log_prob_of_every_token() -> None:
    current, behaviour, advantages = tokens()
    batch = LossTokens(behaviour, advantages, torch.ones_like(advantages))
    value, gradient = evaluate(current, batch, {"objective": "cispo"})
    expected, slopes = 0.0, []
    for log_p, log_q, a in zip(*(column.tolist() for column in (current, behaviour, advantages)), strict=True):
        weight = min(max(math.exp(log_p - log_q), LOW), HIGH)
        expected += weight * a * log_p
        slopes.append(weight * a)
    assert value == pytest.approx(expected, rel=1e-12)
    assert gradient == pytest.approx(slopes, rel=1e-12)


def test_cispo_clips_weights_of_either_sign_and_its_share_of_the_loss_has_the_clipped_weights() -> None:
    """verl's actor/pg_clipfrac counts the same tokens (`compute_policy_loss_cispo` in `core_algos.py`)."""
    current, behaviour, advantages = tokens()
    batch = LossTokens(behaviour, advantages, torch.ones_like(advantages))
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    sums = policy_statistics(current.detach(), batch, low, high, AlgorithmConfig(objective="cispo"))
    ratios = (current - behaviour).exp().tolist()
    assert sums.num_clipped_high.item() == sum(r > HIGH for r in ratios)
    assert sums.num_clipped_low.item() == sum(r < LOW for r in ratios)
    parts = [min(max(r, LOW), HIGH) * a for r, a in zip(ratios, advantages.tolist(), strict=True)]
    assert sums.positive_sum.item() == pytest.approx(sum(part for part in parts if part > 0), rel=1e-6)
    assert sums.negative_sum.item() == pytest.approx(-sum(part for part in parts if part < 0), rel=1e-6)


def test_sapo_fades_the_gradient_of_tokens_on_both_sides_of_ratio_1() -> None:
    """verl's `compute_policy_loss_sapo` in `core_algos.py` has the same gate."""
    current, behaviour, advantages = tokens()
    batch = LossTokens(behaviour, advantages, torch.ones_like(advantages))
    settings = {"objective": "sapo", "tau_pos": 1.5, "tau_neg": 2.5}
    value, gradient = evaluate(current, batch, settings)
    parts, slopes = [], []
    for log_p, log_q, a in zip(*(column.tolist() for column in (current, behaviour, advantages)), strict=True):
        ratio, tau = math.exp(log_p - log_q), 1.5 if a > 0 else 2.5
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        parts.append(4 / tau * gate * a)
        slopes.append(4 * gate * (1 - gate) * ratio * a)
    assert value == pytest.approx(sum(parts), rel=1e-12)
    assert gradient == pytest.approx(slopes, rel=1e-12)
    bounds = (torch.tensor(bound) for bound in AlgorithmConfig(objective="sapo").fixed_bounds)
    sums = policy_statistics(current.detach(), batch, *bounds, AlgorithmConfig.model_validate(settings))
    assert sums.num_clipped_high == sums.num_clipped_low == 0
    assert sums.positive_sum.item() == pytest.approx(sum(part for part in parts if part > 0), rel=1e-9)
    assert sums.negative_sum.item() == pytest.approx(-sum(part for part in parts if part < 0), rel=1e-9)


def test_at_ratio_1_sapo_has_the_gradient_of_the_unclipped_objective() -> None:
    current, _, advantages = tokens()
    _, gradient = evaluate(
        current, LossTokens(current.detach(), advantages, torch.ones_like(advantages)), {"objective": "sapo"}
    )
    assert gradient == pytest.approx(advantages.tolist(), rel=1e-12)


def test_gspo_is_the_clipped_surrogate_of_sequences_and_has_its_gradient() -> None:
    """Compare with the derivative of the sequence objective, the mean over sequences of min(s A, clip(s) A)."""
    current, behaviour, advantages = tokens(per_sequence=True)
    lengths = torch.tensor(LENGTHS)
    index = torch.arange(len(LENGTHS)).repeat_interleave(lengths)
    weights = token_weights(
        "seq-mean-token-mean", lengths, num_trajectories=4, num_tokens=sum(LENGTHS), max_response_length=100
    ).repeat_interleave(lengths)
    log_ratio = (current - behaviour).detach()
    sequence = sequence_log_ratios(log_ratio, torch.ones_like(log_ratio, dtype=torch.bool), index, len(LENGTHS))
    batch = LossTokens(behaviour, advantages, weights, sequence_log_ratio_T=sequence)
    value, gradient = evaluate(current, batch, {"objective": "gspo"})

    expected, slopes, start = 0.0, [], 0
    for length in LENGTHS:
        span = slice(start, start + length)
        s = math.exp(sum((current[span] - behaviour[span]).tolist()) / length)
        sequence_value, slope = clipped(s, advantages[start].item())
        expected += sequence_value / len(LENGTHS)
        slopes += [slope / length / len(LENGTHS)] * length
        start += length
    assert value == pytest.approx(expected, rel=1e-12)
    assert gradient == pytest.approx(slopes, rel=1e-12)
    assert 0 < slopes.count(0.0) < len(slopes)


def test_sequence_ratios_exclude_unusable_tokens_and_do_not_depend_on_the_split_over_ranks() -> None:
    current, behaviour, _ = tokens()
    log_ratio = (current - behaviour).detach()
    log_ratio[3] = math.nan
    counts = ~log_ratio.isnan()
    index = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    whole = sequence_log_ratios(log_ratio, counts, index, 4)
    assert whole[0].item() == pytest.approx(log_ratio[[0, 1, 2, 4, 5, 6]].mean().item(), rel=1e-12)

    halves = [torch.arange(rank, sum(LENGTHS), 2) for rank in range(2)]
    sums: list[Tensor] = []
    for half in halves:
        sequence_log_ratios(log_ratio[half], counts[half], index[half], 4, lambda tensor: sums.append(tensor.clone()))
    for half in halves:
        found = sequence_log_ratios(
            log_ratio[half], counts[half], index[half], 4, lambda tensor: tensor.copy_(sums[0] + sums[1])
        )
        torch.testing.assert_close(found, whole[half], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("objective", ["bapo", "ppo", "gspo", "cispo", "sapo"])
def test_the_loss_of_chunks_adds_up_to_the_loss_of_the_micro_batch(objective: str) -> None:
    current, behaviour, advantages = tokens()
    correction = torch.rand(len(current), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sequence = torch.linspace(-0.3, 0.3, len(current), dtype=torch.float64) if objective == "gspo" else None
    batch = LossTokens(behaviour, advantages, torch.ones_like(advantages), correction, None, sequence)
    value, gradient = evaluate(current, batch, {"objective": objective})
    parts = [evaluate(part, batch[span], {"objective": objective}) for part, span in chunks_of(current)]
    assert sum(value for value, _ in parts) == pytest.approx(value, rel=1e-12)
    assert [slope for _, slopes in parts for slope in slopes] == gradient


def chunks_of(current: Tensor) -> Iterator[tuple[Tensor, slice]]:
    for start in range(0, len(current), 16):
        span = slice(start, min(start + 16, len(current)))
        yield current.detach()[span].requires_grad_(), span


def evaluate(current: Tensor, batch: LossTokens, settings: dict[str, Any]) -> tuple[float, list[float]]:
    """Return the objective, which is the negative loss, and its gradient by the current log-probs."""
    loss = policy_loss(
        current,
        torch.zeros_like(current),
        batch,
        torch.tensor(LOW, dtype=torch.float64),
        torch.tensor(HIGH, dtype=torch.float64),
        AlgorithmConfig.model_validate(settings),
    )
    current.grad = None
    loss.backward()
    assert current.grad is not None
    return -loss.item(), (-current.grad).tolist()
