"""Cores that engines and trainer share, in virtual time: what asks for more than there are becomes slower."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

_LITTLE_S = 1e-9


class SharedCores:
    """Whoever is busy asks for a number of cores; where these are too few, all get the same part of what they ask for.

    Seconds of work are those that it takes on cores of its own.
    """

    def __init__(self, num: float) -> None:
        self._num = num
        self._asked = 0.0
        self._speed = 1.0
        self._working: set[asyncio.Event] = set()

    @contextmanager
    def busy(self, asked: float) -> Iterator[None]:
        """Ask for so many cores meanwhile."""
        self._ask(asked)
        try:
            yield
        finally:
            self._ask(-asked)

    async def work_until(self, stop: asyncio.Event, seconds: float) -> float:
        """Work until `stop` is set or the speed changes; the seconds of work that are done then."""
        loop, speed = asyncio.get_running_loop(), self._speed
        start = loop.time()
        self._working.add(stop)
        try:
            async with asyncio.timeout(seconds / speed):
                await stop.wait()
        except TimeoutError:
            return seconds
        finally:
            self._working.discard(stop)
        return min(seconds, (loop.time() - start) * speed)

    async def work(self, seconds: float) -> None:
        """All of it, whatever happens."""
        while seconds > _LITTLE_S:
            seconds -= await self.work_until(asyncio.Event(), seconds)

    def _ask(self, asked: float) -> None:
        self._asked += asked
        speed = min(1.0, self._num / self._asked) if self._asked > 0 else 1.0
        if speed != self._speed:
            self._speed = speed
            for event in self._working:
                event.set()
