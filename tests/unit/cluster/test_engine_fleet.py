import asyncio
import time
from pathlib import Path
from typing import Self

import pytest

from megatron_bapo.cluster.engine_actor import EngineActor, EnginePlacement, engine_result
from megatron_bapo.cluster.engine_fleet import EngineFleet
from megatron_bapo.cluster.engine_transfers import EngineTransfers
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.rollout.messages import Generated
from megatron_bapo.rollout.router import Router
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from megatron_bapo.weight_sync.route import TransferGroup
from tests.unit.config.examples import config
from tests.unit.rollout.world import settings
from tests.unit.simulation.modelled_engines import LOAD_S, FaultyEngine

START_S = 20.0


class ReplaceableEngine(FaultyEngine):
    """A modelled engine that can be restarted; a restarted engine has version 0."""

    def __init__(self, run: "ModelledRun", name: str, start_s: float = 0.0) -> None:
        super().__init__(name)
        self.run, self.start_s = run, start_s
        self.groups: list[TransferGroup | None] = []
        self.places = (1 + int(name.split()[-1]),)
        run.engines[name] = self

    async def load_weights(self, version: int, group: TransferGroup | None = None) -> None:
        self.groups.append(group)
        await super().load_weights(version)

    def replacement(self) -> Self:
        return type(self)(self.run, self.name, START_S)

    async def started(self) -> int:
        await asyncio.sleep(self.start_s)
        if self.start_s and self.run.broken_starts:
            self.run.broken_starts -= 1
            raise RunError(f"{self.name} did not start")
        return 10**9


class ModelledRun:
    """A fleet of modelled engines, and the events and failures that it reports."""

    def __init__(self, num_engines: int, *, broken_starts: int = 0, transfers: EngineTransfers | None = None) -> None:
        self.router = Router(on_lost=lambda name, reason: self.fleet.on_lost(name, reason))
        self.engines: dict[str, ReplaceableEngine] = {}
        self.broken_starts = broken_starts
        self.failures: list[BaseException] = []
        self.events: list[tuple[str, str, str]] = []
        self.num_waiting = 0
        for index in range(num_engines):
            ReplaceableEngine(self, f"engine {index}")
        self.fleet = EngineFleet(
            self.engines,
            self.router,
            settings(health_check_interval_s=10.0, health_check_timeout_s=30.0, max_engine_restarts=3),
            lambda *event: self.events.append(event),
            self.failures.append,
            transfers,
        )


async def seconds_until_replaced(run: ModelledRun, name: str) -> float:
    old, start = run.engines[name], asyncio.get_running_loop().time()
    while run.router.engines.get(name) in (None, old):
        await asyncio.sleep(0.1)
    return asyncio.get_running_loop().time() - start


@pytest.mark.parametrize(("fault", "limit_s"), [("dies", 10.0 + START_S + 1), ("hangs", 10.0 + 30.0 + START_S + 1)])
def test_an_engine_is_replaced_within_a_bounded_time_and_serves_only_the_current_weights(fault: str, limit_s: float):
    async def main() -> None:
        run = ModelledRun(2)
        await run.fleet.start()
        await asyncio.sleep(12.3)
        await run.fleet.load_weights(7)
        if fault == "dies":
            run.engines["engine 1"].die()
        else:
            run.engines["engine 1"].hangs = True
        assert await seconds_until_replaced(run, "engine 1") <= limit_s
        new = run.router.engines["engine 1"]
        assert isinstance(new, FaultyEngine)
        assert new.version == 7
        assert run.fleet.num_restarts == 1
        assert run.failures == []
        assert [event for _, event, _ in run.events] == ["lost", "serves"]
        await run.fleet.close()

    run_in_virtual_time(main())


def test_an_unanswered_probe_of_the_old_engine_does_not_remove_its_replacement():
    async def main() -> None:
        run = ModelledRun(1)
        await run.fleet.start()
        run.engines["engine 0"].hangs = True
        await asyncio.sleep(11.0)  # the probe waits
        run.router.remove("engine 0", "killed")
        await seconds_until_replaced(run, "engine 0")
        await asyncio.sleep(100.0)
        assert [event for _, event, _ in run.events] == ["lost", "serves"]
        await run.fleet.close()

    run_in_virtual_time(main())


def test_a_replacement_waits_for_a_weight_update_in_progress():
    async def main() -> None:
        run = ModelledRun(2)
        await run.fleet.start()
        load = run.engines["engine 1"].load_weights

        async def slow_load(version: int, group: TransferGroup | None = None) -> None:
            await asyncio.sleep(2 * START_S)
            await load(version, group)

        run.engines["engine 1"].load_weights = slow_load
        run.router.remove("engine 0", "killed")
        loading = asyncio.ensure_future(run.fleet.load_weights(3))
        await asyncio.sleep(2 * START_S - 1.0)
        assert list(run.router.engines) == ["engine 1"]
        await loading
        await asyncio.sleep(LOAD_S + 1.0)
        assert run.router.engines == run.engines
        assert [engine.version for engine in run.engines.values()] == [3, 3]
        await run.fleet.close()

    run_in_virtual_time(main())


def test_an_engine_lost_in_the_trainers_turn_is_replaced_in_the_engines_turn():
    async def main() -> None:
        run = ModelledRun(2)
        await run.fleet.start()
        await run.fleet.to_trainer()
        for name in ("engine 0", "engine 1"):
            run.router.remove(name, "killed while it slept")
        await asyncio.sleep(5 * START_S)
        assert run.router.engines == {}
        await run.fleet.load_weights(4)
        await run.fleet.to_engines()
        await asyncio.sleep(1.5 * START_S)  # both engines start at the same time
        assert run.router.engines == run.engines
        assert [engine.version for engine in run.engines.values()] == [4, 4]
        await run.fleet.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize("broken_starts", [0, 1])
def test_the_trainers_turn_begins_when_a_starting_engine_serves_or_has_failed(broken_starts: int):
    async def main() -> None:
        run = ModelledRun(1, broken_starts=broken_starts)
        await run.fleet.start()
        start_s = asyncio.get_running_loop().time()
        run.router.remove("engine 0", "killed")
        await asyncio.sleep(1.0)
        await run.fleet.to_trainer()
        assert START_S <= asyncio.get_running_loop().time() - start_s < 1.5 * START_S
        assert len(run.router.engines) == 1 - broken_starts  # a serving engine can be put to sleep
        await asyncio.sleep(5 * START_S)
        assert len(run.router.engines) == 1 - broken_starts
        await run.fleet.to_engines()
        await asyncio.sleep(START_S + 1.0)
        assert run.router.engines == run.engines
        await run.fleet.close()

    run_in_virtual_time(main())


def test_an_engine_that_fails_to_start_is_retried_and_then_ends_the_run_with_its_name():
    async def main(broken_starts: int) -> ModelledRun:
        run = ModelledRun(1, broken_starts=broken_starts)
        await run.fleet.start()
        run.router.remove("engine 0", "killed")
        await asyncio.sleep(5 * START_S)
        await run.fleet.close()
        return run

    assert run_in_virtual_time(main(2)).failures == []
    (failure,) = run_in_virtual_time(main(3)).failures
    assert str(failure) == "engine 0 was lost (killed) and did not come back in 3 attempts: engine 0 did not start"


def test_an_unexpected_error_of_a_probe_or_a_replacement_is_reported_at_once():
    """The probe raises an error that engines do not raise; the replacement is refused for the user's settings."""

    async def probed() -> ModelledRun:
        run = ModelledRun(1)

        async def broken() -> dict[str, Generated]:
            raise ValueError("not a number")

        run.engines["engine 0"].progress = broken
        await run.fleet.start()
        await asyncio.sleep(10.1)
        await run.fleet.close()
        return run

    async def restarted() -> ModelledRun:
        run = ModelledRun(1)

        def refused() -> ReplaceableEngine:
            raise UserError("vLLM refuses these settings")

        run.engines["engine 0"].replacement = refused
        await run.fleet.start()
        run.router.remove("engine 0", "killed")
        await asyncio.sleep(0.1)
        await run.fleet.close()
        return run

    assert [str(error) for error in run_in_virtual_time(probed()).failures] == ["not a number"]
    assert [str(error) for error in run_in_virtual_time(restarted()).failures] == ["vLLM refuses these settings"]


class ProcessEngine(ReplaceableEngine):
    """An engine whose probes a process of its own replies to, 0.1 s after each."""

    process: asyncio.subprocess.Process | None = None

    async def started(self) -> int:
        command = "while read probe; do sleep 0.1; echo $probe; done"
        self.process = await asyncio.create_subprocess_exec(
            "sh", "-c", command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        return 10**9

    async def progress(self) -> dict[str, Generated]:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"probe\n")
        self.run.num_waiting += 1
        assert await self.process.stdout.readline() == b"probe\n"
        self.run.num_waiting -= 1
        return {}

    async def end(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()


@pytest.mark.slow
def test_engines_that_reply_while_the_event_loop_is_blocked_are_not_lost():
    async def main() -> None:
        run = ModelledRun(0)
        engines = [ProcessEngine(run, f"engine {index}") for index in range(2)]
        limits = settings(health_check_interval_s=0.1, health_check_timeout_s=3.0)
        run.fleet = EngineFleet(
            run.engines, run.router, limits, lambda *event: run.events.append(event), run.failures.append
        )
        await run.fleet.start()
        for _ in range(2):
            while run.num_waiting < 2:
                await asyncio.sleep(0.01)
            time.sleep(4.0)
            while run.num_waiting:
                await asyncio.sleep(0.01)
        assert run.events == []
        assert list(run.router.engines) == ["engine 0", "engine 1"]
        await run.fleet.close()
        await asyncio.gather(*(engine.end() for engine in engines))

    asyncio.run(main())


@pytest.mark.slow
def test_a_call_that_returns_while_the_event_loop_is_blocked_does_not_cost_the_engine():
    async def main() -> int:
        process = await asyncio.create_subprocess_exec("sleep", "0.1")
        call = asyncio.create_task(engine_result(process.wait(), "engine 0", 1.0))
        await asyncio.sleep(0)
        time.sleep(2.0)
        return await call

    assert asyncio.run(main()) == 0


def test_an_engine_is_not_restarted_if_its_transport_keeps_no_weights(tmp_path: Path):
    settings = config(run_dir=str(tmp_path), weight_sync__transport="cuda_ipc")
    with pytest.raises(RunError, match="transport=cuda_ipc keeps no weights for a new engine; transport=store does"):
        EngineActor(settings, 0, [EnginePlacement(tmp_path, ())], num_restarts=1)
