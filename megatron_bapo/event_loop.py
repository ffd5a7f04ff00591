"""Stalls of the event loop: they do not count against the other side's timeouts, and long work is split into turns.

A reply may wait in a socket while the event loop runs something else, or while the machine runs another process, and
asyncio's timers fire before such a reply is read. `LoopClock` measures by how much a periodic timer is late, and
`answered_within` does not count that time in the last minute of a limit. Long work is limited by its progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

T = TypeVar("T")

BEAT_S = 0.05
"""Period of the heartbeat. A beat that is late by more than this is a stall of the event loop."""
MEASURED_S = 60.0
"""The heartbeat runs only in this last part of a limit: earlier stalls seldom matter to a limit of an hour, and a
simulation of weeks would consist of heartbeats."""


class LoopClock:
    """Heartbeat of an event loop; it stops with its last user, because an eternal timer would hide deadlocks."""

    def __init__(self) -> None:
        self._num_users = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._stalled_s = 0.0
        self._max_delay_s = self._max_own_delay_s = 0.0
        self._waited_s = 0.0
        """Time for which the thread had waited for a processor at the last beat."""

    @staticmethod
    def running() -> LoopClock:
        """Return the clock of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in _clocks:
            _clocks[loop] = LoopClock()
        return _clocks[loop]

    def start(self) -> None:
        """Measure until `stop` has been called as often as this, or the event loop ends."""
        self._num_users += 1
        if self._timer is None:
            self._waited_s = _waited_for_processor_s()
            self._schedule(asyncio.get_running_loop().time() + BEAT_S)

    def stop(self) -> None:
        self._num_users -= 1
        if not self._num_users and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def responsive_s(self) -> float:
        """Return the event loop's time without its stalls, in seconds; only differences have a meaning."""
        now_s = asyncio.get_running_loop().time()
        delay_s = now_s - self._due_s
        return now_s - self._stalled_s - (delay_s if delay_s > BEAT_S else 0.0)

    def take_max_delays_s(self) -> tuple[float, float]:
        """Return the largest delay of a beat since the last call, in seconds.

        The second value leaves out the time for which the thread waited for a processor since the beat before, so that
        it is too small by up to `BEAT_S`.
        """
        delays_s = self._max_delay_s, self._max_own_delay_s
        self._max_delay_s = self._max_own_delay_s = 0.0
        return delays_s

    def _beat(self) -> None:
        delay_s = max(0.0, asyncio.get_running_loop().time() - self._due_s)
        self._max_delay_s = max(self._max_delay_s, delay_s)
        waited_before_s, self._waited_s = self._waited_s, _waited_for_processor_s()
        self._max_own_delay_s = max(self._max_own_delay_s, delay_s - (self._waited_s - waited_before_s))
        if delay_s > BEAT_S:
            self._stalled_s += delay_s
            self._due_s += delay_s
        self._schedule(self._due_s + BEAT_S)

    def _schedule(self, due_s: float) -> None:
        self._due_s = due_s
        self._timer = asyncio.get_running_loop().call_at(due_s, self._beat)


def _waited_for_processor_s() -> float:
    """Return for how long this thread could run, but waited for a processor; 0 where the kernel does not count it.

    Source: `/proc/<pid>/schedstat` in the kernel's Documentation/scheduler/sched-stats.rst.
    """
    with suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = WeakKeyDictionary()


@asynccontextmanager
async def answered_within(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Cancel the block, and raise TimeoutError, when the other side has had so many seconds to reply.

    Stalls of this event loop in the last `MEASURED_S` do not count, and `BEAT_S` more is given, in which replies that
    have arrived are read.
    """
    async with asyncio.timeout(None) as timeout:
        deadline = _Deadline(timeout, seconds)
        try:
            yield timeout
        finally:
            deadline.cancel()


async def gather_progressing(work: Iterable[Coroutine[Any, Any, T]], limit_s: float) -> list[T]:
    """Return the results in order; cancels what is left, and raises TimeoutError, if none is ready for `limit_s`."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        for ready in asyncio.as_completed(tasks):
            async with answered_within(limit_s):
                await ready
    finally:
        for task in tasks:
            task.cancel()
    return [task.result() for task in tasks]


async def unless_raised(work: Coroutine[Any, Any, T], failure: Coroutine[Any, Any, NoReturn]) -> T:
    """Return the result of `work`; if `failure` raises first, `work` is cancelled and that error is raised."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(failure)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def wait_progressing(
    changed: asyncio.Event, is_done: Callable[[], bool], progress: Callable[[], int], limit_s: float
) -> None:
    """Wait until `is_done`, which each change may make true; raises TimeoutError if `progress` stops for `limit_s`."""
    while not is_done():
        before = progress()
        async with answered_within(limit_s):
            while progress() == before and not is_done():
                changed.clear()
                await changed.wait()


@asynccontextmanager
async def own_turn() -> AsyncIterator[None]:
    """Run the block in a turn of the event loop in which no other such block runs.

    It is for copies of a response's tokens, which take milliseconds: many responses may end at once.
    """
    lock = _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())
    async with lock:
        yield
        await asyncio.sleep(0)


_turns: WeakValueDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakValueDictionary()
"""The lock of each event loop, which lives as long as a block has it or waits for it."""


class _Deadline:
    """A timer that is set again for as long as the event loop was stalled."""

    def __init__(self, timeout: asyncio.Timeout, seconds: float) -> None:
        self._timeout = timeout
        self._clock: LoopClock | None = None
        self._has_passed = False
        if seconds > MEASURED_S:
            self._timer = asyncio.get_running_loop().call_later(seconds - MEASURED_S, self._begin, MEASURED_S)
        else:
            self._begin(seconds)

    def _begin(self, seconds: float) -> None:
        self._clock = LoopClock.running()
        self._clock.start()
        self._end_s = self._clock.responsive_s() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def cancel(self) -> None:
        self._timer.cancel()
        if self._clock is not None:
            self._clock.stop()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._clock is not None, "the heartbeat has begun"
        left_s = self._end_s - self._clock.responsive_s()
        if left_s <= 0 and self._has_passed:
            self._timeout.reschedule(loop.time())
            return
        # Checked twice: an event loop may run its timers before it reads its sockets and its clock, as uvloop does.
        self._has_passed = left_s <= 0
        self._timer = loop.call_later(max(left_s, BEAT_S), self._check)


class TurnBudget:
    """Limits work to `num` units in one turn of the event loop, so that timers and replies are served in between."""

    def __init__(self, num: int, resume: Callable[[], None]) -> None:
        """`resume` is called in the next turn if a unit was refused."""
        self._num, self._left, self._resume = num, num, resume
        self._refused = False
        self._next_turn: asyncio.Handle | None = None

    def take(self) -> bool:
        """Return whether another unit may be done in this turn, and count it."""
        if self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._renew)
        self._refused = self._left == 0
        self._left -= not self._refused
        return not self._refused

    def close(self) -> None:
        """Do not call `resume` any more."""
        if self._next_turn is not None:
            self._next_turn.cancel()

    def _renew(self) -> None:
        refused, self._refused, self._left, self._next_turn = self._refused, False, self._num, None
        if refused:
            self._resume()
