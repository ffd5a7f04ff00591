from __future__ import annotations

import pytest
import torch

from megatron_bapo.algorithm.advantages import group_relative_advantages


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_group_of_equal_rewards_gets_exactly_zero(norm_by_std: bool) -> None:
    rewards = torch.tensor([[0.1], [0.7], [1e8], [-3.3]]).expand(4, 7)
    assert group_relative_advantages(rewards, norm_by_std=norm_by_std).equal(torch.zeros(4, 7))


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_group_of_one_gets_zero(norm_by_std: bool) -> None:
    assert group_relative_advantages(torch.tensor([[5.0], [-1.0]]), norm_by_std=norm_by_std).equal(torch.zeros(2, 1))


def test_advantages_are_rewards_standardised_within_their_group() -> None:
    rewards = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, std = rewards.mean(dim=1, keepdim=True), rewards.std(dim=1, keepdim=True)
    torch.testing.assert_close(group_relative_advantages(rewards, norm_by_std=True), (rewards - mean) / (std + 1e-6))
    torch.testing.assert_close(group_relative_advantages(rewards, norm_by_std=False), rewards - mean)


def test_one_right_answer_of_four() -> None:
    advantages = group_relative_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), norm_by_std=True)
    torch.testing.assert_close(advantages, torch.tensor([[1.5, -0.5, -0.5, -0.5]]))
