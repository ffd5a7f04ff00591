from typing import Any

import pytest

from megatron_bapo.config.checks import check_config
from tests.unit.config.examples import config, problems


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"rollout__partial_rollout__token_budget": 100},
            ["token_budget=100 must be less than", "max_response_length=100", "lower it, or remove it"],
        ),
        (
            {"rollout__partial_rollout__over_sampling": 1.5, "rollout__mode": "async"},
            ["over_sampling=1.5 with rollout.mode=async", "max_staleness limits the number", "set over_sampling=1"],
        ),
        (
            {"rollout__partial_rollout__over_sampling": 1.5, "rollout__max_staleness": 0},
            [
                "over_sampling=1.5 with rollout.max_staleness=0",
                "too old for the next one",
                "set max_staleness=1 or more",
            ],
        ),
        (
            {"rollout__max_reuse": 3},
            [
                "rollout.max_reuse=3 needs rollout.max_staleness >= 2",
                "become one policy version older",
                "max_staleness=1",
            ],
        ),
        (
            {"rollout__max_reuse": 2, "trainer__ppo_epochs": 2},
            ["rollout.max_reuse=2 with trainer.ppo_epochs=2", "set one of them to 1"],
        ),
        (
            {"rollout__start_timeout_s": 1800.0},
            ["trainer.collective_timeout_s=1800 must exceed rollout.start_timeout_s=1800", "lower start_timeout_s"],
        ),
        (
            {"rollout__tensor_parallel_size": 2, "rollout__nodes_per_engine": 3},
            ["rollout.nodes_per_engine=3 must divide the 2 ranks of an engine", "the same number"],
        ),
        (
            {"rollout__quantization": "fp8_per_block", "model__dtype": "float32"},
            ["rollout.quantization=fp8_per_block with model.dtype=float32", "set model.dtype=bfloat16"],
        ),
        (
            {"rollout__colocate": True, "trainer__offload": True, "rollout__mode": "async"},
            ["trainer.offload=true make trainer and engines take turns", "rollout.mode=async", "set mode=sync"],
        ),
    ],
    ids=str,
)
def test_contradictory_rollout_settings_are_refused(values: dict[str, Any], expected: list[str]):
    (problem,) = problems(config(**values))
    for part in expected:
        assert part in problem


@pytest.mark.parametrize(
    "values",
    [
        {"rollout__mode": "async", "rollout__on_weight_update": "keep"},
        {"rollout__partial_rollout__token_budget": 50, "rollout__max_staleness": 0},
        {"rollout__partial_rollout": {"over_sampling": 2.0, "token_budget": 50}},
        {"rollout__max_reuse": 2},
    ],
    ids=str,
)
def test_consistent_rollout_settings_are_allowed(values: dict[str, Any]):
    assert check_config(config(**values)) == []


def test_async_rollouts_with_zero_staleness_are_warned_that_nothing_overlaps():
    (warning,) = check_config(config(rollout__mode="async", rollout__max_staleness=0, rollout__on_weight_update="keep"))
    assert "nothing can be generated while the trainer trains; raise max_staleness" in warning


@pytest.mark.parametrize("values", [{"mode": "async"}, {"partial_rollout": {"over_sampling": 2.0}}], ids=str)
def test_uninterrupted_responses_are_warned_to_delay_weight_updates(values: dict[str, Any]):
    (warning,) = check_config(config(rollout=values | {"n": 8, "max_response_length": 100}))
    assert "the longest response in flight is finished; set token_budget, or on_weight_update=" in warning
