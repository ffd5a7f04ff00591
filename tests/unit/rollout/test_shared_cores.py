import asyncio

import pytest

from megatron_bapo.rollout.shared_cores import SharedCores
from megatron_bapo.rollout.virtual_time import run_in_virtual_time


async def busy(cores: SharedCores, *, asked: float, seconds: float, start: float = 0.0) -> float:
    """When the work is done."""
    await asyncio.sleep(start)
    with cores.busy(asked) as own:
        await own.work(seconds)
    return asyncio.get_running_loop().time()


def test_who_asks_for_more_than_a_fair_share_gets_what_the_others_leave():
    async def main() -> list[float]:
        cores = SharedCores(2.0)
        return await asyncio.gather(
            busy(cores, asked=0.5, seconds=10.0), busy(cores, asked=2.0, seconds=4.0, start=2.0)
        )

    modest, greedy = run_in_virtual_time(main())
    assert modest == pytest.approx(10)
    assert greedy == pytest.approx(2 + 4 * 2.0 / 1.5)


def test_those_that_overlap_slow_down_while_they_do():
    async def main() -> list[float]:
        cores = SharedCores(2.0)
        return await asyncio.gather(
            busy(cores, asked=1.0, seconds=10.0), busy(cores, asked=1.25, seconds=4.0, start=2.0)
        )

    first, second = run_in_virtual_time(main())
    assert second == pytest.approx(2 + 4 * 1.25)
    assert first == pytest.approx(10)


def test_busy_threads_share_alike_whoever_they_belong_to():
    """Four of one party and one of another on four cores: 3.2 and 0.8."""

    async def main() -> list[float]:
        cores = SharedCores(4.0)
        return await asyncio.gather(busy(cores, asked=4.0, seconds=4.0), busy(cores, asked=1.0, seconds=4.0))

    assert run_in_virtual_time(main()) == pytest.approx([5.0, 5.0])


def test_enough_cores_slow_nobody_down():
    async def main() -> list[float]:
        cores = SharedCores(2.0)
        return await asyncio.gather(busy(cores, asked=1.0, seconds=3.0), busy(cores, asked=1.0, seconds=4.0))

    assert run_in_virtual_time(main()) == pytest.approx([3.0, 4.0])


def test_work_that_is_stopped_says_how_much_of_it_is_done():
    async def main() -> float:
        cores, stop = SharedCores(1.0), asyncio.Event()
        asyncio.get_running_loop().call_later(3.0, stop.set)
        with cores.busy(2.0) as own:
            return await own.work_until(stop, 10.0)

    assert run_in_virtual_time(main()) == pytest.approx(1.5)
