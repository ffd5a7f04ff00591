from typing import Any

import pytest

from megatron_bapo.config.checks import check_config
from tests.unit.config.examples import config, problems


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"rollout__partial_rollout__token_budget": 100},
            ["token_budget=100 must be less than", "max_response_length=100", "lower it, or leave it out"],
        ),
        (
            {"rollout__partial_rollout__over_sampling": 1.5, "rollout__mode": "async"},
            ["over_sampling=1.5 with rollout.mode=async", "max_staleness says how many", "set over_sampling=1"],
        ),
        (
            {"rollout__partial_rollout__over_sampling": 1.5, "rollout__max_staleness": 0},
            ["over_sampling=1.5 with rollout.max_staleness=0", "too old for the next", "set max_staleness=1 or more"],
        ),
        (
            {"rollout__max_reuse": 3},
            ["rollout.max_reuse=3 needs rollout.max_staleness >= 2", "age by one policy version", "max_staleness=1"],
        ),
        (
            {"rollout__max_reuse": 2, "trainer__ppo_epochs": 2},
            ["rollout.max_reuse=2 with trainer.ppo_epochs=2", "set one of them to 1"],
        ),
        (
            {"rollout__colocate": True, "trainer__offload": True, "rollout__mode": "async"},
            ["trainer.offload=true make trainer and engines take turns", "rollout.mode=async", "set mode=sync"],
        ),
    ],
    ids=str,
)
def test_settings_of_the_rollouts_that_contradict_each_other_are_refused(values: dict[str, Any], expected: list[str]):
    (problem,) = problems(config(**values))
    for part in expected:
        assert part in problem


@pytest.mark.parametrize(
    "values",
    [
        {"rollout__mode": "async", "rollout__on_refresh": "keep"},
        {"rollout__partial_rollout__token_budget": 50, "rollout__max_staleness": 0},
        {"rollout__partial_rollout": {"over_sampling": 2.0, "token_budget": 50}},
        {"rollout__max_reuse": 2},
    ],
    ids=str,
)
def test_what_fits_together_is_allowed(values: dict[str, Any]):
    assert check_config(config(**values)) == []


def test_async_rollouts_that_may_not_be_stale_are_told_that_nothing_overlaps():
    (warning,) = check_config(config(rollout__mode="async", rollout__max_staleness=0, rollout__on_refresh="keep"))
    assert "nothing can be generated while the trainer trains; raise max_staleness" in warning


@pytest.mark.parametrize("values", [{"mode": "async"}, {"partial_rollout": {"over_sampling": 2.0}}], ids=str)
def test_whole_answers_in_flight_are_said_to_hold_up_new_weights(values: dict[str, Any]):
    (warning,) = check_config(config(rollout=values | {"n": 8, "max_response_length": 100}))
    assert (
        "new weights wait until the longest answer in flight is finished; set token_budget, or on_refresh=" in warning
    )
