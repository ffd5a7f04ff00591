"""The garbage collector does not stop the event loop for long with the objects of 16,384 responses."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_bapo import garbage_collection
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.garbage_collection import GarbageCollector
from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.scheduler import RolloutScheduler
from megatron_bapo.simulation.modelled_engine import EngineModel
from megatron_bapo.simulation.response_lengths import lognormal_lengths
from megatron_bapo.simulation.simulator import Workload, simulate

NUM_GROUPS, N, NUM_ENGINES, MAX_NUM_SEQS = 1024, 16, 64, 256
MAX_LENGTH, MEAN_LENGTH = 64, 16
NUM_BATCHES = 3
OBJECTS_OF_A_RESPONSE = 5
PAUSE_S = 0.1


@pytest.fixture
def own_settings() -> Iterator[None]:
    """Restore the collector's settings."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@contextmanager
def recorded_pauses() -> Iterator[list[float]]:
    """Yield a list that receives the CPU seconds of each collection."""
    pauses, start = list[float](), 0.0

    def record(phase: str, _: dict[str, int]) -> None:
        nonlocal start
        if phase == "start":
            start = time.thread_time()
        else:
            pauses.append(time.thread_time() - start)

    gc.callbacks.append(record)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(record)


@pytest.mark.slow
def test_collections_are_short_with_the_objects_of_16384_responses_which_leave_no_garbage(
    own_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RolloutConfig(
        mode="async", max_staleness=1, n=N, max_response_length=MAX_LENGTH, on_weight_update="abort_and_resume"
    )
    engine = EngineModel(DecodeCost(1e-3, 0.0, 0.0, 0.0), 0.0, 0.0, 1 << 20, MAX_NUM_SEQS, load_s=0.1)
    lengths = lognormal_lengths(MEAN_LENGTH, 0.8, MAX_LENGTH)
    workload = Workload(engine, NUM_ENGINES, NUM_GROUPS, 8, lengths, train_s=0.02)
    take, num_exempt, num_garbage, num_pauses = RolloutScheduler.take, list[int](), list[int](), list[int]()

    async def taken(scheduler: RolloutScheduler) -> ScoredGroups:
        scored = await take(scheduler)
        collector.exempt_survivors()
        num_exempt.append(gc.get_freeze_count())
        if scheduler.num_batches == NUM_BATCHES:
            num_pauses.append(len(pauses))
            gc.unfreeze()
            num_garbage.append(gc.collect())
        return scored

    monkeypatch.setattr(RolloutScheduler, "take", taken)
    collector = GarbageCollector()
    num_before = gc.get_freeze_count()
    with recorded_pauses() as pauses:
        simulate(settings, workload, num_steps=NUM_BATCHES - 1)

    print(f"longest collection {max(pauses[: num_pauses[0]]):.3f} s, {num_garbage[0]} objects of garbage")
    assert max(num_exempt) - num_before > OBJECTS_OF_A_RESPONSE * NUM_GROUPS * N
    assert max(pauses[: num_pauses[0]]) < PAUSE_S
    assert num_garbage[0] < 0.01 * NUM_GROUPS * N


@pytest.mark.slow
def test_cycles_of_old_objects_are_collected_when_there_are_many(
    own_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage_collection, "MAX_MORE_EXEMPT", 50_000)
    collector, most = GarbageCollector(), 0
    num_before = gc.get_freeze_count()
    for _ in range(20):
        cycles = [[[]] for _ in range(10_000)]
        for cycle in cycles:
            cycle[0].append(cycle)
        collector.exempt_survivors()
        most = max(most, gc.get_freeze_count() - num_before)
        del cycles, cycle

    assert most < 100_000
