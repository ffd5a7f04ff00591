"""Groups of weight transfers from GPU to GPU, as engines are lost and replaced, in virtual time."""

import asyncio

from megatron_bapo.cluster.engine_transfers import EngineTransfers
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from megatron_bapo.weight_sync.route import TransferGroup
from tests.unit.cluster.test_engine_fleet import START_S, ModelledRun

TRAINER = (0,)
NOTICE_S = 10.0


class DirectRun(ModelledRun):
    """A fleet whose engines get their weights in groups, and the keys that its service has set."""

    def __init__(self, num_engines: int) -> None:
        self.keys: dict[str, str] = {}
        super().__init__(num_engines, transfers=EngineTransfers(1, self.publish, NOTICE_S))

    async def publish(self, key: str, value: str) -> None:
        self.keys[key] = value

    async def update(self, version: int, broken: str = "") -> TransferGroup:
        group = await self.fleet.begin_transfer(version, "plan", broken)
        await self.fleet.load_weights(version)
        return group


def test_a_group_is_kept_while_the_same_engines_serve_and_no_fault_has_ended_it():
    async def main() -> None:
        run = DirectRun(2)
        await run.fleet.start()
        first, second = await run.update(1), await run.update(2)
        assert first == second
        assert first.places == (*TRAINER, 1, 2)
        third = await run.update(3, broken=second.name)
        assert third.name != second.name
        assert third.places == second.places
        assert [engine.groups for engine in run.engines.values()] == [[first, second, third]] * 2
        assert run.keys == {}
        await run.fleet.close()

    run_in_virtual_time(main())


def test_a_repeated_call_of_the_trainer_gets_the_same_group_and_loads_once():
    async def main() -> None:
        run = DirectRun(1)
        await run.fleet.start()
        async with run.fleet._weights:  # as a health check
            call = asyncio.ensure_future(run.fleet.begin_transfer(1, "plan", ""))
            await asyncio.sleep(0.1)
        group = await call
        assert group == await run.fleet.begin_transfer(1, "plan", "")
        await asyncio.wait_for(run.fleet.load_weights(1), 10.0)
        assert not run.fleet._weights.locked()
        await run.fleet.load_weights(1)
        assert run.engines["engine 0"].groups == [group]
        await run.fleet.close()

    run_in_virtual_time(main())


def test_a_replacement_gets_the_current_version_when_the_trainer_waits_for_rollouts():
    async def main() -> None:
        run = DirectRun(2)
        await run.fleet.start()
        await run.update(5)
        waiting = asyncio.get_running_loop().create_future()
        run.engines["engine 1"].die()
        run.router.remove("engine 1", "killed")
        assert not await run.fleet.unless_lacking(waiting), "the trainer goes on waiting while no engine lacks weights"
        assert asyncio.get_running_loop().time() >= START_S
        assert list(run.router.engines) == ["engine 0"], "it does not serve without weights"
        group = await run.update(5)
        assert group.places == (*TRAINER, 2), "only the replacement takes part"
        await asyncio.sleep(0.1)
        assert run.router.engines == run.engines
        assert [engine.version for engine in run.engines.values()] == [5, 5]
        waiting.set_result(None)
        assert await run.fleet.unless_lacking(waiting)
        both = await run.update(6)
        assert both.places == (*TRAINER, 1, 2)
        assert run.failures == []
        await run.fleet.close()

    run_in_virtual_time(main())


def test_a_replacement_takes_part_in_the_next_update_if_that_comes_first():
    async def main() -> None:
        run = DirectRun(2)
        await run.fleet.start()
        await run.update(1)
        run.router.remove("engine 0", "killed")
        await asyncio.sleep(2 * START_S)  # the trainer trains meanwhile
        assert list(run.router.engines) == ["engine 1"]
        group = await run.update(2)
        assert group.places == (*TRAINER, 1, 2)
        await asyncio.sleep(0.1)
        assert [engine.version for engine in run.engines.values()] == [2, 2]
        assert run.router.engines == run.engines
        await run.fleet.close()

    run_in_virtual_time(main())


def test_an_engine_lost_during_a_transfer_ends_the_group_and_the_next_one_has_those_that_are_left():
    async def main() -> None:
        run = DirectRun(3)
        await run.fleet.start()
        group = await run.fleet.begin_transfer(1, "plan", "")
        loading = asyncio.ensure_future(run.fleet.load_weights(1))
        await asyncio.sleep(0)
        run.engines["engine 1"].die()
        await asyncio.sleep(0.01)
        assert run.keys[group.failed_key] == "engine 1 was lost: engine 1 died"
        start = asyncio.get_running_loop().time()
        following = await run.fleet.repeat_transfer(group, "the trainer's reason")
        assert asyncio.get_running_loop().time() == start, "the loss is known"
        assert following.places == (*TRAINER, 1, 3)
        assert run.keys[group.next_key] == following.to_json()
        assert await run.fleet.repeat_transfer(group, "the trainer's reason") == following, "Ray may repeat the call"
        await loading
        assert list(run.router.engines) == ["engine 0", "engine 2"]
        await run.fleet.close()

    run_in_virtual_time(main())


def test_a_failure_that_no_engine_explains_is_repeated_with_all_of_them_after_a_while():
    async def main() -> None:
        run = DirectRun(1)
        transfers = EngineTransfers(1, run.publish, NOTICE_S)
        group = transfers.begin(run.engines, "plan", "")
        start = asyncio.get_running_loop().time()
        following = await transfers.repeat(group, "a connection was reset")
        assert asyncio.get_running_loop().time() - start == NOTICE_S
        assert following.name != group.name
        assert following.places == group.places

    run_in_virtual_time(main())


def test_a_replacement_that_dies_while_it_receives_is_started_again():
    async def main() -> None:
        run = DirectRun(1)
        await run.fleet.start()
        await run.update(1)
        run.router.remove("engine 0", "killed")
        await asyncio.sleep(2 * START_S)
        run.engines["engine 0"].die()
        group = await run.update(1)
        assert run.keys[group.failed_key] == "engine 0 was lost: engine 0 died"
        await asyncio.sleep(2 * START_S)
        await run.update(1)
        await asyncio.sleep(0.1)
        assert [engine.version for engine in run.engines.values()] == [1]
        assert run.router.engines == run.engines
        assert [event for _, event, _ in run.events] == ["lost", "failed to start", "serves"]
        assert run.failures == []
        await run.fleet.close()

    run_in_virtual_time(main())
