import asyncio
import time

import pytest

from megatron_bapo.simulation.virtual_time import run_in_virtual_time


def test_virtual_hours_pass_quickly_and_in_order():
    seen = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        await asyncio.gather(sleeper("late", 7200.0), sleeper("early", 0.25), sleeper("middle", 3600.5))

    start = time.monotonic()
    run_in_virtual_time(main())
    assert time.monotonic() - start < 0.01 * 7200
    assert seen == [("early", 0.25), ("middle", 3600.5), ("late", 7200.0)]


def test_time_limits_expire_on_the_virtual_clock():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(900.0):
                await asyncio.sleep(10_000.0)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == pytest.approx(900.0)


def test_waiting_forever_is_an_error():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_in_virtual_time(main())
