from __future__ import annotations

import math

import pytest
import torch

from megatron_bapo.algorithm.importance import clamped_log_ratio, mismatch_sums


def test_log_ratios_are_clamped_and_nan_stays_nan() -> None:
    clamped = clamped_log_ratio(torch.tensor([-math.inf, -21.0, 1.5, math.inf, math.nan]))
    torch.testing.assert_close(clamped, torch.tensor([-20.0, -20.0, 1.5, 20.0, math.nan]), equal_nan=True)


def test_a_clamped_log_ratio_has_no_gradient() -> None:
    log_ratio = torch.tensor([-math.inf, -21.0, 1.5, math.inf], requires_grad=True)
    clamped_log_ratio(log_ratio).exp().sum().backward()
    torch.testing.assert_close(log_ratio.grad, torch.tensor([0.0, 0.0, math.exp(1.5), 0.0]))


def test_mismatch_of_two_tokens_by_hand() -> None:
    sums = mismatch_sums(torch.tensor([0.5, 0.2]).log(), torch.tensor([0.25, 0.3]).log())
    assert sums.num_tokens.item() == 2
    assert sums.abs_prob_diff_sum.item() == pytest.approx(0.35, rel=1e-6)
    assert sums.abs_prob_diff_max.item() == pytest.approx(0.25, rel=1e-6)
    assert sums.k3_kl_sum.item() == pytest.approx(1 - math.log(2) + 2 / 3 - 1 - math.log(2 / 3), rel=1e-6)
    assert sums.mult_prob_error_sum.item() == pytest.approx(2 + 3 / 2, rel=1e-6)
    assert sums.importance_ratio_sum.item() == pytest.approx(2 + 2 / 3, rel=1e-6)


def test_equal_log_probs_have_no_mismatch() -> None:
    log_probs = torch.tensor([-0.1, -3.0, -math.inf])
    sums = mismatch_sums(log_probs[:2], log_probs[:2])
    assert sums.abs_prob_diff_sum.item() == sums.abs_prob_diff_max.item() == sums.k3_kl_sum.item() == 0
    assert sums.mult_prob_error_sum.item() == sums.importance_ratio_sum.item() == 2


def test_nan_tokens_are_dropped_and_counted() -> None:
    sums = mismatch_sums(torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]))
    assert (sums.num_tokens.item(), sums.num_dropped.item(), sums.abs_prob_diff_max.item()) == (1, 1, 0)
    assert sums.mult_prob_error_sum.item() == sums.importance_ratio_sum.item() == 1


def test_an_empty_micro_batch_has_zero_sums() -> None:
    sums = mismatch_sums(torch.zeros(0), torch.zeros(0))
    assert (sums.num_tokens.item(), sums.abs_prob_diff_max.item(), sums.k3_kl_sum.item()) == (0, 0, 0)
