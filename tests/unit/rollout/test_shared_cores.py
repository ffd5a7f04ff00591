import asyncio

import pytest

from megatron_bapo.rollout.shared_cores import SharedCores
from megatron_bapo.rollout.virtual_time import run_in_virtual_time


async def busy(cores: SharedCores, *, asked: float, seconds: float, start: float = 0.0) -> float:
    """When the work is done."""
    await asyncio.sleep(start)
    with cores.busy(asked):
        await cores.work(seconds)
    return asyncio.get_running_loop().time()


def test_those_that_overlap_slow_down_alike_while_they_do():
    async def main() -> list[float]:
        cores = SharedCores(2.0)
        return await asyncio.gather(
            busy(cores, asked=1.0, seconds=10.0), busy(cores, asked=1.5, seconds=4.0, start=2.0)
        )

    first, second = run_in_virtual_time(main())
    assert second == pytest.approx(2 + 4 * 2.5 / 2)
    assert first == pytest.approx(10 + (5 - 4))


def test_enough_cores_slow_nobody_down():
    async def main() -> list[float]:
        cores = SharedCores(2.0)
        return await asyncio.gather(busy(cores, asked=1.0, seconds=3.0), busy(cores, asked=1.0, seconds=4.0))

    assert run_in_virtual_time(main()) == pytest.approx([3.0, 4.0])


def test_work_that_is_stopped_says_how_much_of_it_is_done():
    async def main() -> float:
        cores, stop = SharedCores(1.0), asyncio.Event()
        asyncio.get_running_loop().call_later(3.0, stop.set)
        with cores.busy(2.0):
            return await cores.work_until(stop, 10.0)

    assert run_in_virtual_time(main()) == pytest.approx(1.5)
