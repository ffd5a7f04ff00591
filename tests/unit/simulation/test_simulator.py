from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.simulation.modelled_engine import EngineModel
from megatron_bapo.simulation.response_lengths import lognormal_lengths
from megatron_bapo.simulation.simulator import Simulated, Workload, best, candidates, simulate

ENGINE = EngineModel(
    DecodeCost(1.0, 0.0, 0.0, 0.0), prefill_s=0.0, sequence_s=0.0, kv_tokens=10**6, max_num_seqs=100, load_s=5.0
)
EQUAL = Workload(ENGINE, 1, 4, 10, np.array([20], np.int32), train_s=20.0)
"""Responses of 20 tokens take 20 s, updates 20 s, a weight update 5 s and its probe 1 s."""
TAILED = replace(EQUAL, lengths=lognormal_lengths(100.0, 1.0, 800), num_engines=2, train_s=100.0)
SETTINGS = RolloutConfig.model_validate({"n": 2, "max_response_length": 800})


def test_a_sync_step_is_the_sum_of_generation_updates_and_weight_update():
    result = simulate(SETTINGS, EQUAL, num_steps=4)

    assert result.seconds == pytest.approx(4 * (20 + 20 + 5 + 1))
    assert (result.staleness_max, result.dropped_stale) == (0, 0)
    assert result.engine_idle == pytest.approx(25 / 46)
    assert result.trainer_idle == pytest.approx(26 / 46)
    assert result.tokens_per_s == pytest.approx(8 * 20 / 46)
    assert result.num_running == pytest.approx((8 * 20 + 1) / 46)
    assert result.most_running == 8


def test_async_hides_generation_behind_updates_of_the_same_length():
    settings = SETTINGS.model_copy(update={"mode": "async"})

    result = simulate(settings, EQUAL, num_steps=4, num_first_steps=2)

    assert result.seconds == pytest.approx(4 * (20 + 5 + 1))
    assert result.staleness_max == 1


def test_updates_take_longer_on_stale_tokens():
    stale = replace(EQUAL, stale_train_share=0.1)
    asynchronous = SETTINGS.model_copy(update={"mode": "async"})

    sync, hidden = (simulate(each, stale, num_steps=4, num_first_steps=2) for each in (SETTINGS, asynchronous))

    assert sync.trainer_idle == pytest.approx(1 - 4 * 20 / sync.seconds)
    assert hidden.trainer_idle == pytest.approx(1 - 4 * 22 / hidden.seconds)


def test_async_hides_nothing_on_too_few_cores():
    shared = replace(
        EQUAL, num_cores=2.0, trainer_cores=2.0, engine=replace(ENGINE, num_cores=2.0), lengths=np.array([20], np.int32)
    )
    asynchronous = SETTINGS.model_copy(update={"mode": "async"})

    sync, hidden = (simulate(each, shared, num_steps=4, num_first_steps=2) for each in (SETTINGS, asynchronous))

    assert sync.seconds == pytest.approx(4 * (20 + 20 + 5 + 1))
    assert hidden.seconds == pytest.approx(sync.seconds)


def test_no_candidate_is_staler_than_it_may_be_and_all_train_the_same_number_of_groups():
    found = candidates(SETTINGS)
    results = {name: simulate(each, TAILED, num_steps=4) for name, each in found.items()}

    assert all(result.staleness_max <= found[name].max_staleness for name, result in results.items())
    assert results["async 2"].steps_per_hour > 1.2 * results["sync"].steps_per_hour
    assert results["sync, budget 100"].steps_per_hour > 1.05 * results["sync"].steps_per_hour
    assert all(0 <= share <= 1 for r in results.values() for share in (r.engine_idle, r.trainer_idle))


def test_progress_reports_fill_engines_and_change_no_times_where_all_requests_fit():
    """Responses that are reported to have ended need no room, so that other groups take it."""
    settings = SETTINGS.model_copy(update={"n": 8})
    never = settings.model_copy(update={"health_check_interval_s": 1e7})
    scarce = replace(TAILED, engine=replace(ENGINE, kv_tokens=1000), groups_per_batch=16)

    without, reported = (simulate(each, scarce, num_steps=4) for each in (never, settings))

    assert reported.seconds < 0.9 * without.seconds
    ample = [simulate(each, TAILED, num_steps=3).seconds for each in (never, settings)]
    assert ample == pytest.approx([ample[0]] * 2)


def test_the_same_seed_gives_the_same_run():
    settings = candidates(SETTINGS)["async 4"]

    first, again, other = (simulate(settings, TAILED, num_steps=3, seed=seed) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_coarse_tokens_change_the_times_little():
    long = replace(TAILED, lengths=TAILED.lengths * 4, train_s=400.0)
    fine = SETTINGS.model_copy(update={"max_response_length": 3200, "mode": "async"})

    coarse = simulate(fine.model_copy(update={"max_response_length": 4096}), long, num_steps=3)

    assert coarse.seconds == pytest.approx(simulate(fine, long, num_steps=3).seconds, rel=0.03)


def test_the_best_settings_are_the_least_stale_of_the_fastest():
    def result(steps_per_hour: float, staleness: float) -> Simulated:
        return Simulated(1.0, 1, steps_per_hour, 1.0, 0.0, 1.0, 1, 0.0, staleness, staleness, 0.0, 20.0)

    assert best({"a": result(50.0, 0), "b": result(99.0, 2), "c": result(100.0, 4), "d": result(99.5, 8)}) == "b"


FAST_UPDATES = Workload(
    EngineModel(DecodeCost(0.01, 0.0, 0.0, 0.0), 0.0, 0.0, kv_tokens=10**9, max_num_seqs=10**6, load_s=0.5),
    num_engines=2,
    groups_per_batch=6,
    prompt_tokens=2,
    lengths=lognormal_lengths(98.0, 0.9, 400),
    train_s=0.01,
    score_s=0.05,
)
"""Updates take less time than most responses, so that many are unfinished when the next batch is taken."""
STALE_MODES: dict[str, dict[str, Any]] = {
    "async 1": {"mode": "async", "max_staleness": 1},
    "async 4": {"mode": "async", "max_staleness": 4},
    "async 2, n=8, 1 s updates": {"mode": "async", "max_staleness": 2, "n": 8},
    "async 4, pieces": {"mode": "async", "max_staleness": 4, "partial_rollout": {"token_budget": 40}},
    "over-sampling": {"max_staleness": 1, "partial_rollout": {"token_budget": 40, "over_sampling": 3.0}},
    "async 3, reuse": {"mode": "async", "max_staleness": 3, "max_reuse": 2},
}


def with_fast_updates(**values: Any) -> Simulated:
    """Simulate 150 steps of the same prompts and lengths."""
    keys = {"n": 2, "max_response_length": 400, "on_weight_update": "abort_and_resume"} | values
    workload = replace(FAST_UPDATES, train_s=1.0 if keys["n"] == 8 else FAST_UPDATES.train_s)
    return simulate(RolloutConfig.model_validate(keys), workload, num_steps=150, num_first_steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("mode", STALE_MODES)
def test_the_lengths_trained_on_are_the_synchronous_ones_within_1_percent(mode: str):
    values = STALE_MODES[mode]
    sync = with_fast_updates(n=values.get("n", 2), max_reuse=values.get("max_reuse", 1), max_staleness=1)

    waits = with_fast_updates(**values)

    assert waits.response_length == pytest.approx(sync.response_length, rel=0.01)
    assert waits.dropped_stale == 0
    assert waits.staleness_max <= values["max_staleness"]
    assert waits.tokens_per_s > 1.2 * sync.tokens_per_s


def test_with_drop_the_policy_is_trained_on_shorter_responses_and_no_more_tokens_per_second():
    values = STALE_MODES["async 1"]

    waits, drops = with_fast_updates(**values), with_fast_updates(**values, on_stale="drop")

    assert drops.dropped_stale > 0.1
    assert drops.response_length < 0.85 * waits.response_length
    assert drops.steps_per_hour > 1.2 * waits.steps_per_hour
    assert drops.tokens_per_s < 1.05 * waits.tokens_per_s
