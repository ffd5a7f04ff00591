from dataclasses import replace

import numpy as np
import pytest

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.rollout.answer_lengths import lognormal_lengths
from megatron_bapo.rollout.modelled_engine import EngineModel
from megatron_bapo.rollout.simulation import Simulated, Workload, best, candidates, simulate

ENGINE = EngineModel(
    DecodeCost(1.0, 0.0, 0.0, 0.0), prefill_s=0.0, sequence_s=0.0, kv_tokens=10**6, max_num_seqs=100, load_s=5.0
)
EQUAL = Workload(ENGINE, 1, 4, 10, np.array([20], np.int32), train_s=20.0)
"""Answers of 20 tokens in 20 s, updates of 20 s, 5 s for new weights and 1 s for their probe."""
TAILED = replace(EQUAL, lengths=lognormal_lengths(100.0, 1.0, 800), num_engines=2, train_s=100.0)
SETTINGS = RolloutConfig.model_validate({"n": 2, "max_response_length": 800})


def test_sync_adds_up_generation_updates_and_new_weights():
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


def test_on_cores_that_are_too_few_async_hides_nothing():
    shared = replace(
        EQUAL, num_cores=2.0, trainer_cores=2.0, engine=replace(ENGINE, num_cores=2.0), lengths=np.array([20], np.int32)
    )
    asynchronous = SETTINGS.model_copy(update={"mode": "async"})

    sync, hidden = (simulate(each, shared, num_steps=4, num_first_steps=2) for each in (SETTINGS, asynchronous))

    assert sync.seconds == pytest.approx(4 * (20 + 20 + 5 + 1))
    assert hidden.seconds == pytest.approx(4 * (20 + 20 + 5))  # the probe runs beside the answers


def test_no_candidate_is_staler_than_it_may_be_and_all_train_the_same_number_of_groups():
    found = candidates(SETTINGS)
    results = {name: simulate(each, TAILED, num_steps=4) for name, each in found.items()}

    assert all(result.staleness_max <= found[name].max_staleness for name, result in results.items())
    assert results["async 2"].steps_per_hour > 1.2 * results["sync"].steps_per_hour
    assert results["sync, budget 100"].steps_per_hour > 1.05 * results["sync"].steps_per_hour
    assert all(0 <= share <= 1 for r in results.values() for share in (r.engine_idle, r.trainer_idle))


def test_the_same_seed_gives_the_same_run():
    settings = candidates(SETTINGS)["async 4"]

    first, again, other = (simulate(settings, TAILED, num_steps=3, seed=seed) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_tokens_that_stand_for_many_change_the_times_little():
    long = replace(TAILED, lengths=TAILED.lengths * 4, train_s=400.0)
    fine = SETTINGS.model_copy(update={"max_response_length": 3200, "mode": "async"})

    coarse = simulate(fine.model_copy(update={"max_response_length": 4096}), long, num_steps=3)

    assert coarse.seconds == pytest.approx(simulate(fine, long, num_steps=3).seconds, rel=0.03)


def test_the_best_is_the_least_stale_of_those_that_are_about_as_fast():
    def result(steps_per_hour: float, staleness: float) -> Simulated:
        return Simulated(1.0, 1, steps_per_hour, 1.0, 0.0, 1.0, 1, 0.0, staleness, staleness, 0.0)

    assert best({"a": result(50.0, 0), "b": result(99.0, 2), "c": result(100.0, 4), "d": result(99.5, 8)}) == "b"
