import asyncio

import pytest

from megatron_bapo.errors import RunError
from megatron_bapo.rollout.health import EngineHealth
from megatron_bapo.rollout.messages import GenerationEngine
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.virtual_time import run_in_virtual_time
from tests.unit.rollout.modelled_engines import ModelledEngine

START_S = 20.0


class ModelledFleet:
    """Restarted engines have version 0 until they are brought up to date."""

    def __init__(self, num_engines: int, *, broken_starts: int = 0) -> None:
        self.router = Router(on_lost=lambda name, reason: self.health.on_lost(name, reason))
        self.engines = {f"engine {i}": ModelledEngine(f"engine {i}") for i in range(num_engines)}
        self.broken_starts = broken_starts
        self.version = 0
        self.failures: list[RunError] = []
        self.events: list[tuple[str, str, str]] = []
        self.health = EngineHealth(
            self.router,
            self,
            lambda *event: self.events.append(event),
            self.failures.append,
            interval_s=10.0,
            timeout_s=30.0,
            max_restarts=3,
        )

    def start(self) -> None:
        for name, engine in self.engines.items():
            self.router.add(name, engine, 10**9)
        self.health.start()

    async def restart(self, name: str) -> tuple[GenerationEngine, int]:
        await asyncio.sleep(START_S)
        if self.broken_starts:
            self.broken_starts -= 1
            raise RunError(f"{name} did not start")
        self.engines[name] = ModelledEngine(name)
        return self.engines[name], 10**9

    async def load_current_weights(self, engine: GenerationEngine) -> None:
        await engine.load_weights(self.version)


async def seconds_until_replaced(fleet: ModelledFleet, name: str) -> float:
    old, start = fleet.engines[name], asyncio.get_running_loop().time()
    while fleet.router.engines.get(name) in (None, old):
        await asyncio.sleep(0.1)
    return asyncio.get_running_loop().time() - start


@pytest.mark.parametrize(("fault", "limit_s"), [("dies", 10.0 + START_S + 1), ("hangs", 10.0 + 30.0 + START_S + 1)])
def test_an_engine_is_replaced_within_a_bounded_time_and_serves_only_the_current_weights(fault: str, limit_s: float):
    async def main() -> None:
        fleet = ModelledFleet(2)
        fleet.start()
        await asyncio.sleep(12.3)
        fleet.version = 7
        if fault == "dies":
            fleet.engines["engine 1"].die()
        else:
            fleet.engines["engine 1"].hangs = True
        assert await seconds_until_replaced(fleet, "engine 1") <= limit_s
        new = fleet.router.engines["engine 1"]
        assert isinstance(new, ModelledEngine)
        assert new.version == 7
        assert fleet.health.num_restarts == 1
        assert fleet.failures == []
        assert [event for _, event, _ in fleet.events] == ["lost", "serves"]
        await fleet.health.close()

    run_in_virtual_time(main())


def test_a_probe_that_the_old_engine_does_not_answer_does_not_cost_the_new_one_its_place():
    async def main() -> None:
        fleet = ModelledFleet(1)
        fleet.start()
        fleet.engines["engine 0"].hangs = True
        await asyncio.sleep(11.0)  # the probe waits
        fleet.router.remove("engine 0", "killed")
        await seconds_until_replaced(fleet, "engine 0")
        await asyncio.sleep(100.0)
        assert [event for _, event, _ in fleet.events] == ["lost", "serves"]
        await fleet.health.close()

    run_in_virtual_time(main())


def test_a_replacement_waits_for_weights_that_are_on_their_way():
    async def main() -> None:
        fleet = ModelledFleet(1)
        fleet.start()
        fleet.router.remove("engine 0", "killed")
        async with fleet.health.weights:
            await asyncio.sleep(2 * START_S)
            assert fleet.router.engines == {}
            fleet.version = 3
        await asyncio.sleep(1.0)
        assert fleet.router.engines == fleet.engines
        assert fleet.engines["engine 0"].version == 3
        await fleet.health.close()

    run_in_virtual_time(main())


def test_an_engine_lost_in_the_trainers_turn_is_replaced_in_the_engines_turn():
    async def main() -> None:
        fleet = ModelledFleet(2)
        fleet.start()
        await fleet.health.to_trainer()
        for name in ("engine 0", "engine 1"):
            fleet.router.remove(name, "killed while it slept")
        await asyncio.sleep(5 * START_S)
        assert fleet.router.engines == {}
        fleet.version = 4
        await fleet.health.to_engines()
        await asyncio.sleep(1.5 * START_S)  # both at a time
        assert fleet.router.engines == fleet.engines
        assert [engine.version for engine in fleet.engines.values()] == [4, 4]
        await fleet.health.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize("broken_starts", [0, 1])
def test_the_trainers_turn_begins_when_the_engine_that_starts_serves_or_has_failed(broken_starts: int):
    async def main() -> None:
        fleet = ModelledFleet(1, broken_starts=broken_starts)
        fleet.start()
        start_s = asyncio.get_running_loop().time()
        fleet.router.remove("engine 0", "killed")
        await asyncio.sleep(1.0)
        await fleet.health.to_trainer()
        assert START_S <= asyncio.get_running_loop().time() - start_s < 1.5 * START_S
        assert len(fleet.router.engines) == 1 - broken_starts  # one that serves can be told to sleep
        await asyncio.sleep(5 * START_S)
        assert len(fleet.router.engines) == 1 - broken_starts
        await fleet.health.to_engines()
        await asyncio.sleep(START_S + 1.0)
        assert fleet.router.engines == fleet.engines
        await fleet.health.close()

    run_in_virtual_time(main())


def test_an_engine_that_fails_to_start_is_tried_again_and_then_ends_the_run_by_name():
    async def main(broken_starts: int) -> ModelledFleet:
        fleet = ModelledFleet(1, broken_starts=broken_starts)
        fleet.start()
        fleet.router.remove("engine 0", "killed")
        await asyncio.sleep(5 * START_S)
        await fleet.health.close()
        return fleet

    assert run_in_virtual_time(main(2)).failures == []
    (failure,) = run_in_virtual_time(main(3)).failures
    assert str(failure) == "engine 0 was lost (killed) and did not come back in 3 attempts: engine 0 did not start"
