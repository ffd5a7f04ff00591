import asyncio

import pytest

from megatron_bapo.simulation.cpu_contention import SharedCores
from megatron_bapo.simulation.virtual_time import run_in_virtual_time


async def busy(cores: SharedCores, *, requested: float, seconds: float, start: float = 0.0) -> float:
    """Return the time at which the work is done."""
    await asyncio.sleep(start)
    with cores.busy(requested) as own:
        await own.work(seconds)
    return asyncio.get_running_loop().time()


def test_a_client_that_requests_more_than_its_fair_share_gets_what_the_others_leave():
    async def main() -> list[float]:
        cores = SharedCores(2.0)
        return await asyncio.gather(
            busy(cores, requested=0.5, seconds=10.0), busy(cores, requested=2.0, seconds=4.0, start=2.0)
        )

    modest, greedy = run_in_virtual_time(main())
    assert modest == pytest.approx(10)
    assert greedy == pytest.approx(2 + 4 * 2.0 / 1.5)


def test_clients_slow_down_while_they_compete():
    async def main() -> list[float]:
        cores = SharedCores(2.0)
        return await asyncio.gather(
            busy(cores, requested=1.0, seconds=10.0), busy(cores, requested=1.25, seconds=4.0, start=2.0)
        )

    first, second = run_in_virtual_time(main())
    assert second == pytest.approx(2 + 4 * 1.25)
    assert first == pytest.approx(10)


def test_all_busy_threads_get_equal_shares():
    """Four threads of one client and one of another share four cores as 3.2 and 0.8."""

    async def main() -> list[float]:
        cores = SharedCores(4.0)
        return await asyncio.gather(busy(cores, requested=4.0, seconds=4.0), busy(cores, requested=1.0, seconds=4.0))

    assert run_in_virtual_time(main()) == pytest.approx([5.0, 5.0])


def test_nobody_slows_down_with_enough_cores():
    async def main() -> list[float]:
        cores = SharedCores(2.0)
        return await asyncio.gather(busy(cores, requested=1.0, seconds=3.0), busy(cores, requested=1.0, seconds=4.0))

    assert run_in_virtual_time(main()) == pytest.approx([3.0, 4.0])


def test_interrupted_work_returns_the_seconds_done():
    async def main() -> float:
        cores, stop = SharedCores(1.0), asyncio.Event()
        asyncio.get_running_loop().call_later(3.0, stop.set)
        with cores.busy(2.0) as own:
            return await own.work_until(stop, 10.0)

    assert run_in_virtual_time(main()) == pytest.approx(1.5)
