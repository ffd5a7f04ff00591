from __future__ import annotations

import itertools
import math

import pytest
import torch

from megatron_bapo.algorithm.advantages import (
    estimate_advantages,
    group_relative_advantages,
    overlong_penalty,
    token_returns,
    whiten,
)
from megatron_bapo.config.algorithm import AlgorithmConfig

BUILT_IN = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def settings(estimator: str) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"adv_estimator": estimator})


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_group_of_equal_rewards_gets_exactly_zero(norm_by_std: bool) -> None:
    rewards = torch.tensor([[0.1], [0.7], [1e8], [-3.3]]).expand(4, 7)
    assert group_relative_advantages(rewards, norm_by_std=norm_by_std).equal(torch.zeros(4, 7))
    sums = torch.tensor([[0.1 + 0.2, 0.3, 0.3], [-1.1, -0.4 - 0.7, 3.3 - 4.4]], dtype=torch.float64)
    assert (sums != sums[:, :1]).any(dim=1).all()
    assert group_relative_advantages(sums, norm_by_std=norm_by_std).equal(torch.zeros_like(sums))


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_group_of_one_gets_zero(norm_by_std: bool) -> None:
    assert group_relative_advantages(torch.tensor([[5.0], [-1.0]]), norm_by_std=norm_by_std).equal(torch.zeros(2, 1))


def test_advantages_are_rewards_standardised_within_their_group() -> None:
    rewards = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, std = rewards.mean(dim=1, keepdim=True), rewards.std(dim=1, keepdim=True)
    torch.testing.assert_close(group_relative_advantages(rewards, norm_by_std=True), (rewards - mean) / (std + 1e-6))
    torch.testing.assert_close(group_relative_advantages(rewards, norm_by_std=False), rewards - mean)


def test_one_correct_response_of_four() -> None:
    advantages = group_relative_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), norm_by_std=True)
    torch.testing.assert_close(advantages, torch.tensor([[1.5, -0.5, -0.5, -0.5]]))


LENGTHS = torch.tensor([[2, 5, 1], [3, 3, 9]])
REWARDS = torch.tensor([[1.0, 0.0, 0.5], [0.2, 0.9, -1.0]], dtype=torch.float64)
PENALTIES = torch.linspace(-0.1, 0.2, 23, dtype=torch.float64)


def trajectories(penalties: torch.Tensor | None) -> list[list[tuple[float, list[float]]]]:
    """Return (reward, token penalties) of each trajectory of each group as Python floats."""
    rest = iter((torch.zeros(23) if penalties is None else penalties).tolist())
    return [
        [(reward, [next(rest) for _ in range(length)]) for reward, length in zip(rewards, lengths, strict=True)]
        for rewards, lengths in zip(REWARDS.tolist(), LENGTHS.tolist(), strict=True)
    ]


def standardised(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return [(value - mean) / math.sqrt(variance + 1e-8) for value in values]


def expected_advantages(estimator: str, penalties: torch.Tensor | None) -> list[float]:
    """Compute the advantages from their definitions, token by token."""
    found: list[float] = []
    for group in trajectories(penalties):
        totals = [reward - sum(costs) for reward, costs in group]
        mean = sum(totals) / len(totals)
        std = math.sqrt(sum((total - mean) ** 2 for total in totals) / (len(totals) - 1))
        for i, (reward, costs) in enumerate(group):
            others = totals[:i] + totals[i + 1 :]
            for t in range(len(costs)):
                found.append(
                    {
                        "grpo": (totals[i] - mean) / (std + 1e-6),
                        "rloo": totals[i] - sum(others) / len(others),
                        "reinforce_plus_plus": reward - sum(costs[t:]),
                        "reinforce_plus_plus_baseline": totals[i] - mean,
                    }[estimator]
                )
    return standardised(found) if estimator.startswith("reinforce") else found


@pytest.mark.parametrize("penalties", [None, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("estimator", BUILT_IN)
def test_every_estimator_matches_its_definition(estimator: str, penalties: torch.Tensor | None) -> None:
    lengths = LENGTHS.flatten().tolist()
    if estimator == "reinforce_plus_plus" and penalties is not None:
        found = whiten(token_returns(REWARDS.flatten(), penalties, lengths), torch.ones(23))
    else:
        sums = None if penalties is None else torch.stack([part.sum() for part in penalties.split(lengths)])
        found = estimate_advantages(settings(estimator), REWARDS, LENGTHS, sums)
        assert found.shape == (6,)
        found = found.repeat_interleave(LENGTHS.flatten())
    assert found.tolist() == pytest.approx(expected_advantages(estimator, penalties), rel=1e-11)


def test_dr_grpo_is_the_difference_from_the_group_mean() -> None:
    found = estimate_advantages(AlgorithmConfig(norm_adv_by_std=False), REWARDS, LENGTHS, None)
    torch.testing.assert_close(found, (REWARDS - REWARDS.mean(1, keepdim=True)).flatten())


def test_equal_rewards_give_zero_advantages_under_any_estimator() -> None:
    for estimator, reward, factor in itertools.product(BUILT_IN, (0.1, 0.7, -1.3, 1e8 / 3), range(1, 6)):
        rewards = torch.full((2, 3), reward, dtype=torch.float64)
        found = estimate_advantages(settings(estimator), rewards, LENGTHS * factor, None)
        assert not found.any(), f"{estimator}: {found}"


def test_the_overlong_penalty_falls_linearly_within_the_buffer() -> None:
    found = overlong_penalty(torch.tensor([[10, 80, 85, 90, 100]]), 100, buffer_length=20, penalty_factor=0.5)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, -0.125, -0.25, -0.5]], dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitening_takes_its_mean_and_variance_from_the_accepted_tokens(estimator: str) -> None:
    """Accept two thirds of the tokens, and none of the first trajectory, which has two."""
    accepted = (torch.arange(23) % 3 != 1) & (torch.arange(23) >= 2)
    num_accepted = torch.stack([part.sum() for part in accepted.split(LENGTHS.flatten().tolist())])
    found = estimate_advantages(settings(estimator), REWARDS, LENGTHS, None, num_accepted=num_accepted)
    rewards = REWARDS - REWARDS.mean(dim=1, keepdim=True) if estimator.endswith("baseline") else REWARDS
    values, advantages = (each.flatten().repeat_interleave(LENGTHS.flatten()) for each in (rewards, found))
    assert advantages[accepted].tolist() == pytest.approx(standardised(values[accepted].tolist()), rel=1e-12)
    assert found[0] == 0.0


def test_whitening_of_penalized_tokens_leaves_out_the_rejected_ones() -> None:
    accepted = torch.arange(23) % 3 != 1
    found = whiten(token_returns(REWARDS.flatten(), PENALTIES, LENGTHS.flatten().tolist()), accepted.double())
    everything = itertools.chain(*trajectories(PENALTIES))
    returns = [reward - sum(costs[t:]) for reward, costs in everything for t in range(len(costs))]
    kept = [value for value, is_accepted in zip(returns, accepted.tolist(), strict=True) if is_accepted]
    assert found[accepted].tolist() == pytest.approx(standardised(kept), rel=1e-11)
    assert found[~accepted].tolist() == [0.0] * int((~accepted).sum())


@pytest.mark.parametrize(("start", "end"), [(0, 23), (0, 7), (7, 23), (23, 23)])
def test_a_part_of_the_tokens_is_whitened_as_in_the_whole_batch(start: int, end: int) -> None:
    returns, accepted = token_returns(REWARDS.flatten(), PENALTIES, LENGTHS.flatten().tolist()), torch.arange(23) % 3
    whole_sums: list[torch.Tensor] = []

    def noted(values: torch.Tensor) -> torch.Tensor:
        whole_sums.append(values.sum())
        return whole_sums[-1]

    whole = whiten(returns, accepted, noted)
    sums = iter(whole_sums)
    assert whiten(returns[start:end], accepted[start:end], lambda _: next(sums)).equal(whole[start:end])


def test_whitening_without_an_accepted_token_gives_zeros() -> None:
    none = torch.zeros(6, dtype=torch.int64)
    found = estimate_advantages(settings("reinforce_plus_plus"), REWARDS, LENGTHS, None, num_accepted=none)
    assert found.equal(torch.zeros(6, dtype=torch.float64))
