"""Objectives and advantages of a user: what they give, and functions that are refused."""

import inspect
import itertools
import math
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_bapo.algorithm.advantages import estimate_advantages
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss, policy_statistics
from megatron_bapo.algorithm.user_functions import check_user_advantages, check_user_objective
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.errors import UserError
from tests import user_functions
from tests.unit.algorithm.test_objectives import HIGH, LOW, evaluate, tokens

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/algorithms/own_functions.md").read_text(encoding="utf-8")
WRONG = {
    "loss": r"returned a tensor \[\] of torch.float32; return a floating-point tensor \[25\]",
    "centred": "the value of a token depends on other tokens",
    "without_gradient": "its value has no gradient; compute it from log_ratio or log_probs",
    "not_finite": "its value or gradient is not finite",
    "few_arguments": "cannot be called with the arguments log_ratio, log_probs, advantages, low, high",
    "asynchronous": "is an async function; write it with def",
    "dppp": "has no 'dppp'; did you mean 'dppo'",
}
WRONG_ADVANTAGES = {
    "of_groups": r"returned a tensor \[4\] of torch.float64; return a floating-point tensor \[4, 8\] with the",
    "divided_by_zero": r"not all advantages are finite for the rewards \[1.0, 1.0, .* of a group",
    "whole_numbers": r"returned a tensor \[4, 8\] of torch.int64",
    "dppo": "cannot be called with the arguments rewards, lengths",
}


def settings(name: str) -> dict[str, str]:
    return {"objective": "function", "function": f"tests.user_functions:{name}"}


def test_a_function_gets_the_ratios_and_bounds_that_ppo_has() -> None:
    current, behaviour, advantages = tokens()
    weights = torch.linspace(0.1, 1.0, len(advantages), dtype=torch.float64)
    behaviour[5], weights[3], correction = math.nan, 0.0, weights.flip(0).clone()
    batch = LossTokens(behaviour, advantages, weights, correction_T=correction)
    found, expected = (evaluate(current, batch, given) for given in (settings("ppo"), {"objective": "ppo"}))
    assert found == expected
    sums = [
        policy_statistics(
            current.detach(), batch, torch.tensor(LOW), torch.tensor(HIGH), AlgorithmConfig.model_validate(given)
        )
        for given in (settings("ppo"), {"objective": "ppo"})
    ]
    assert sums[0] == sums[1]


def test_masked_tokens_have_no_part_in_an_objective_with_terms_without_the_advantage() -> None:
    """They keep their place in the loss: its KL penalty and its entropy bonus."""
    current, behaviour, advantages = tokens()
    masked = (advantages < 0) & (torch.arange(len(advantages)) % 2 == 0)
    advantages = advantages.masked_fill(masked, 0.0)
    batch = LossTokens(behaviour, advantages, torch.ones_like(advantages), reference_log_probs_T=behaviour - 0.1)
    without = replace(batch, weights_T=batch.weights_T.masked_fill(masked, 0.0))
    batch, objective = replace(batch, masked_T=masked), settings("near_behaviour")
    assert evaluate(current, batch, objective) == evaluate(current, without, objective)
    assert all(slope != 0 for slope in evaluate(current, batch, {**objective, "kl_loss_coef": 0.1})[1])


def test_a_token_that_is_left_out_has_no_part_in_the_loss_where_the_function_is_infinite() -> None:
    current, behaviour, advantages = tokens()
    current = current.detach().clamp(max=-0.05).requires_grad_()
    behaviour[3], correction = math.nan, torch.ones_like(advantages).index_fill(0, torch.tensor([7]), 0.0)
    batch = LossTokens(behaviour, advantages, torch.ones_like(advantages), correction_T=correction)
    value, slopes = evaluate(current, batch, settings("unlikelihood"))
    assert math.isfinite(value)
    assert [place for place, slope in enumerate(slopes) if slope == 0] == [3, 7]


def test_the_function_of_the_documentation_is_dppo() -> None:
    """Compare with arXiv 2602.04879 (binary total variation), token by token with Python floats."""
    current, behaviour, advantages = tokens()
    batch = LossTokens(behaviour, advantages, torch.ones_like(advantages))
    value, gradient = evaluate(current, batch, settings("dppo"))
    expected, slopes = 0.0, []
    for log_p, log_q, advantage in zip(*(x.tolist() for x in (current, behaviour, advantages)), strict=True):
        moved = math.exp(log_p) - math.exp(log_q)
        is_near = moved <= HIGH - 1 if advantage > 0 else moved >= LOW - 1
        slopes.append(min(math.exp(log_p - log_q), 20.0) * advantage * is_near)
        expected += slopes[-1] * log_p
    assert value == pytest.approx(expected, rel=1e-12)
    assert gradient == pytest.approx(slopes, rel=1e-12)
    assert 2 < sum(slope == 0 for slope in slopes) < 45
    assert inspect.getsource(user_functions.dppo) in PAGE


@pytest.mark.parametrize("num_right", range(7))
def test_the_advantages_of_the_documentation_are_those_of_pass_at_4(num_right: int) -> None:
    """Compare with the mean over all sets of 4 of the 6 responses."""
    rewards = torch.zeros(1, 6, dtype=torch.float64)
    rewards[0, :num_right] = 1.0
    given = AlgorithmConfig(adv_estimator="function", adv_function="tests.user_functions:pass_at_4")
    found = estimate_advantages(given, rewards, torch.ones(1, 6), None)
    sets = [*itertools.combinations(range(6), 4)]
    passed = [float(min(each) < num_right) for each in sets]
    mean, std = statistics.fmean(passed), statistics.pstdev(passed)
    of_response = [statistics.fmean(p for each, p in zip(sets, passed, strict=True) if i in each) for i in range(6)]
    assert found.tolist() == pytest.approx([(value - mean) / std if std else 0.0 for value in of_response], abs=1e-12)
    assert inspect.getsource(user_functions.pass_at_4) in PAGE


@pytest.mark.parametrize("group_size", [4, 16])
def test_right_advantages_pass_the_check(group_size: int) -> None:
    check_user_advantages("tests.user_functions:pass_at_4", group_size)


@pytest.mark.parametrize("name", WRONG_ADVANTAGES)
def test_wrong_advantages_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UserError, match=WRONG_ADVANTAGES[name]):
        check_user_advantages(f"tests.user_functions:{name}", 8)


def test_a_chunk_without_tokens_has_no_loss() -> None:
    nothing = torch.zeros(0)
    bounds = torch.tensor(LOW), torch.tensor(HIGH)
    log_probs = nothing.clone().requires_grad_()
    loss = policy_loss(
        log_probs,
        nothing,
        LossTokens(nothing, nothing, nothing),
        *bounds,
        AlgorithmConfig.model_validate(settings("dppo")),
    )
    loss.backward()
    assert loss.item() == 0.0


@pytest.mark.parametrize("name", ["dppo", "ppo"])
def test_a_right_function_passes_the_check(name: str) -> None:
    check_user_objective(f"tests.user_functions:{name}")


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UserError, match=WRONG[name]):
        check_user_objective(f"tests.user_functions:{name}")


def test_the_command_prints_what_is_wrong() -> None:
    command = [sys.executable, "-m", "megatron_bapo.algorithm.user_functions", "algorithm.function"]
    wrong, right = (
        subprocess.run([*command, f"tests.user_functions:{name}", "4"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for name in ("wrong_shapes", "dppo")
    )
    assert (wrong.returncode, right.returncode, right.stdout) == (1, 0, "")
    assert wrong.stdout.startswith("algorithm.function=tests.user_functions:wrong_shapes raised RuntimeError: ")
