import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from megatron_bapo import event_loop
from megatron_bapo.errors import RunError
from megatron_bapo.event_loop import BEAT_S, LoopClock, TurnBudget, answered_within, gather_progressing, own_turn
from megatron_bapo.simulation.virtual_time import run_in_virtual_time

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
"""Ray's actors run uvloop's, which fires timers before it reads sockets."""


def run(main: Coroutine[Any, Any, Any], new_loop: Callable[[], asyncio.AbstractEventLoop]) -> Any:
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)


async def byte_after(seconds: float) -> bytes:
    """What another thread sends through a socket."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)

    def reply() -> None:
        time.sleep(seconds)
        with theirs:
            theirs.send(b"x")

    thread = threading.Thread(target=reply)
    thread.start()
    try:
        return await reader.read(1)
    finally:
        await asyncio.to_thread(thread.join)
        writer.close()


async def block(*durations_s: float) -> None:
    for duration_s in durations_s:
        await asyncio.sleep(0.02)
        time.sleep(duration_s)


@pytest.mark.slow
@LOOPS
@pytest.mark.parametrize(("num_replies", "stall_s"), [(1, 2.0), (5, 0.4)], ids=["one stall", "many stalls"])
def test_replies_that_arrive_while_the_event_loop_is_blocked_are_in_time(new_loop, num_replies, stall_s):
    async def main() -> list[bytes]:
        blocking = asyncio.create_task(block(*[stall_s] * num_replies))
        try:
            async with answered_within(1.0):
                return [await byte_after(0.05) for _ in range(num_replies)]
        finally:
            await blocking

    assert run(main(), new_loop) == [b"x"] * num_replies


@LOOPS
def test_a_limit_that_begins_after_a_stall_is_as_long_as_any_other(new_loop):
    async def main() -> bytes:
        async with asyncio.timeout(None):  # uvloop reads its clock once in each turn of the loop
            await asyncio.sleep(0)
            time.sleep(1.5)
            async with answered_within(1.0):
                return await byte_after(0.2)

    assert run(main(), new_loop) == b"x"


@LOOPS
@pytest.mark.parametrize("stall_s", [0.0, 0.2])
def test_silence_is_a_timeout_also_in_an_event_loop_that_is_always_blocked(new_loop, stall_s):
    async def main() -> None:
        blocking = asyncio.create_task(block(*[stall_s] * 1000))
        with pytest.raises(TimeoutError):
            async with answered_within(0.3):
                await asyncio.Event().wait()
        assert not blocking.done()
        blocking.cancel()

    run(main(), new_loop)


def test_a_cancelled_wait_is_no_timeout_and_leaves_no_timer_behind():
    async def main() -> None:
        async def wait() -> None:
            async with answered_within(60.0):
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="deadlock"):
        run_in_virtual_time(main())


def test_without_stalls_the_limit_is_exact_up_to_a_beat():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with answered_within(30.0):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert 30.0 <= run_in_virtual_time(main()) <= 30.0 + 2 * BEAT_S


def test_a_limit_of_days_is_simulated_without_a_heartbeat_until_its_last_minute():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with answered_within(1e6):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert 1e6 <= run_in_virtual_time(main()) <= 1e6 + 2 * BEAT_S


async def after(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


def test_work_that_progresses_is_gathered_in_order_however_long_it_takes():
    async def main() -> list[float]:
        return await gather_progressing(map(after, [30.0, 9.0, 20.0, 39.0]), limit_s=11.0)

    assert run_in_virtual_time(main()) == [30.0, 9.0, 20.0, 39.0]


def test_work_without_progress_is_cancelled_at_the_limit():
    ended = list[str]()

    async def never() -> float:
        try:
            return await after(1e9)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await gather_progressing([after(1.0), never(), never()], limit_s=11.0)
        assert asyncio.get_running_loop().time() == pytest.approx(12.0, abs=0.2)
        await asyncio.sleep(0)

    run_in_virtual_time(main())
    assert ended == ["cancelled"] * 2


def test_work_that_fails_cancels_the_rest():
    async def fails() -> float:
        raise RunError("no more")

    async def main() -> None:
        left = asyncio.ensure_future(after(1e9))
        with pytest.raises(RunError, match="no more"):
            await gather_progressing([asyncio.wait_for(left, None), fails()], limit_s=11.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert left.cancelled()

    run_in_virtual_time(main())


@pytest.mark.slow
def test_the_longest_stall_is_reported_once():
    async def main() -> tuple[float, float, float]:
        clock = LoopClock.running()
        clock.start()
        await block(0.2, 1.5, 0.2)
        await asyncio.sleep(2 * BEAT_S)
        longest_s, own_s = clock.take_max_delays_s()
        await asyncio.sleep(0)
        return longest_s, own_s, clock.take_max_delays_s()[0]

    longest_s, own_s, later_s = asyncio.run(main())
    assert longest_s >= 1.5 - BEAT_S
    assert own_s <= longest_s
    assert later_s < longest_s


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count waiting time")
def test_time_in_which_the_thread_waits_for_a_processor_is_no_stall_of_its_own():
    """Two processes share one processor, so that the loop waits for about half of the time that its work takes."""
    processor = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{processor}]); print(flush=True)\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

    async def main() -> tuple[float, float]:
        clock = LoopClock.running()
        clock.start()
        await asyncio.sleep(2 * BEAT_S)
        clock.take_max_delays_s()
        end_s = time.thread_time() + 0.5
        while time.thread_time() < end_s:
            pass
        await asyncio.sleep(2 * BEAT_S)
        return clock.take_max_delays_s()

    processors = os.sched_getaffinity(0)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        os.sched_setaffinity(0, [processor])
        stall_s, own_s = asyncio.run(main())
    finally:
        os.sched_setaffinity(0, processors)
        other.kill()
        other.communicate()
    assert own_s == pytest.approx(0.5, abs=0.2)
    assert stall_s > own_s + 0.2


def test_blocks_that_end_at_once_have_a_turn_of_the_event_loop_each():
    turns, num = list[int](), 0

    async def count_turns() -> None:
        nonlocal num
        while True:
            await asyncio.sleep(0)
            num += 1

    async def copy() -> None:
        async with own_turn():
            turns.append(num)

    async def main() -> None:
        counting = asyncio.ensure_future(count_turns())
        await asyncio.gather(*(copy() for _ in range(5)))
        counting.cancel()

    run_in_virtual_time(main())
    assert len(set(turns)) == 5
    assert not event_loop._turns


def test_a_turn_budget_spreads_work_over_the_turns_of_the_event_loop():
    async def main() -> list[int]:
        turn, done, left = 0, list[int](), 25

        def work() -> None:
            nonlocal left
            while left and budget.take():
                left -= 1
                done.append(turn)

        budget = TurnBudget(10, work)
        work()
        work()
        for turn in range(1, 6):  # noqa: B007
            await asyncio.sleep(0)
        return done

    assert asyncio.run(main()) == [0] * 10 + [1] * 10 + [2] * 5


def test_a_closed_turn_budget_does_not_resume_work():
    async def main() -> int:
        num = 0

        def work() -> None:
            nonlocal num
            while budget.take():
                num += 1

        budget = TurnBudget(3, work)
        work()
        budget.close()
        await asyncio.sleep(0.01)
        return num

    assert asyncio.run(main()) == 3
