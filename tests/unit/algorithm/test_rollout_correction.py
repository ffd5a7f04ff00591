"""Weights and rejections against their definitions, computed token by token with Python floats."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_bapo.algorithm.rollout_correction import RolloutCorrection, rollout_correction
from megatron_bapo.config.algorithm import RolloutCorrectionConfig

LENGTHS = [5, 1, 20, 8]


def log_probs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return proximal and rollout log-probs."""
    generator = torch.Generator().manual_seed(1)
    rollout = -2 * torch.rand(sum(LENGTHS), generator=generator, dtype=torch.float64)
    return rollout + 0.5 * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64), rollout


def correct(**settings: Any) -> RolloutCorrection:
    return rollout_correction(*log_probs(), torch.tensor(LENGTHS), RolloutCorrectionConfig.model_validate(settings))


def ratios(level: str) -> list[float]:
    """Return the ratio of each token at a level."""
    proximal, rollout = (values.tolist() for values in log_probs())
    found, start = [], 0
    for length in LENGTHS:
        own = [p - q for p, q in zip(proximal[start : start + length], rollout[start : start + length], strict=True)]
        of_sequence = {"sequence": sum(own), "geometric": sum(own) / length}
        found += [math.exp(of_sequence.get(level, x)) for x in own]
        start += length
    return found


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_truncated_ratios(level: str) -> None:
    correction, expected = correct(rollout_is=level, rollout_is_threshold=1.5), ratios(level)
    assert correction.weights_T.tolist() == pytest.approx([min(r, 1.5) for r in expected], rel=1e-12)
    weight, truncated, rejected, corrections = correction.sums_B4.sum(dim=0).tolist()
    assert weight == corrections == pytest.approx(sum(min(r, 1.5) for r in expected))
    assert truncated == sum(r > 1.5 for r in expected) > 0
    assert rejected == 0


@pytest.mark.parametrize(
    ("level", "lower", "upper"), [("token", 0.9, 1.1), ("sequence", 0.3, 2.0), ("geometric", 0.9, 1.1)]
)
def test_ratios_outside_the_thresholds_are_rejected_and_counted(level: str, lower: float, upper: float) -> None:
    correction = correct(rollout_rs=level, rollout_rs_threshold=upper, rollout_rs_threshold_lower=lower)
    kept = [lower <= r <= upper for r in ratios(level)]
    assert correction.weights_T.tolist() == [float(k) for k in kept]
    sequences = [kept[sum(LENGTHS[:i]) : sum(LENGTHS[: i + 1])] for i in range(len(LENGTHS))]
    assert correction.sums_B4[:, 2].tolist() == [k.count(False) for k in sequences]
    assert 0 < sum(kept) < len(kept)


def test_the_lower_threshold_defaults_to_the_inverse_of_the_upper_one() -> None:
    kept = correct(rollout_rs="token", rollout_rs_threshold=1.25).weights_T
    assert kept.tolist() == [float(0.8 <= r <= 1.25) for r in ratios("token")]


def test_weights_and_rejection_combine() -> None:
    correction = correct(rollout_is="token", rollout_is_threshold=1.2, rollout_rs="geometric", rollout_rs_threshold=1.1)
    expected = [
        min(r, 1.2) if 1 / 1.1 <= g <= 1.1 else 0.0 for r, g in zip(ratios("token"), ratios("geometric"), strict=True)
    ]
    assert correction.weights_T.tolist() == pytest.approx(expected, rel=1e-12)
    assert correction.sums_B4[:, 3].sum().item() == pytest.approx(sum(expected))
    assert 0 < expected.count(0.0) < len(expected)


def test_equal_policies_get_no_correction() -> None:
    _, rollout = log_probs()
    settings = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="sequence")
    correction = rollout_correction(rollout, rollout, torch.tensor(LENGTHS), settings)
    assert correction.weights_T.equal(torch.ones_like(rollout))
    assert correction.sums_B4[:, 1:3].count_nonzero() == 0


def test_a_sequence_of_extreme_ratios_stays_finite() -> None:
    settings = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=1e30)
    correction = rollout_correction(torch.zeros(3), torch.full((3,), -900.0), torch.tensor([3]), settings)
    assert correction.weights_T.tolist() == pytest.approx([math.exp(20)] * 3)


@pytest.mark.parametrize(("level", "kept"), [("token", [1, 0, 1, 1]), ("sequence", [0, 0, 0, 1])])
@pytest.mark.parametrize("rollout_is", [None, "token"])
def test_a_ratio_that_is_nan_is_rejected_as_in_verl(rollout_is: str | None, level: str, kept: list[int]) -> None:
    settings = RolloutCorrectionConfig.model_validate({"rollout_is": rollout_is, "rollout_rs": level})
    rollout = torch.tensor([-1.0, math.nan, -1.0, -1.0])
    correction = rollout_correction(torch.full((4,), -1.0), rollout, torch.tensor([3, 1]), settings)
    assert correction.weights_T.tolist() == kept
    assert correction.sums_B4[:, 2].tolist() == [3 - sum(kept[:3]), 0]
    assert correction.sums_B4[:, 0].tolist() == [2 if rollout_is else 3, 1]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_rank_without_trajectories_has_no_weights(level: str) -> None:
    settings = RolloutCorrectionConfig.model_validate({"rollout_is": "token", "rollout_rs": level})
    correction = rollout_correction(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), settings)
    assert correction.weights_T.shape == (0,)
    assert correction.sums_B4.shape == (0, 4)
