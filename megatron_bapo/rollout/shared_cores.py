"""Cores that engines and trainer share, in virtual time: who asks for more than a fair share of them becomes slower."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

_LITTLE_S = 1e-9


class BusyCores:
    """One party's part of the cores. Seconds of work are those that it takes on cores of its own."""

    def __init__(self, asked: float) -> None:
        self.asked = asked
        self.num_threads = max(1, round(asked))
        self._speed = 1.0
        self._stop: asyncio.Event | None = None

    def give(self, num: float) -> None:
        """So many cores are its own from now on."""
        speed = num / self.asked if self.asked > 0 else 1.0
        if speed != self._speed:
            self._speed = speed
            if self._stop is not None:
                self._stop.set()

    async def work_until(self, stop: asyncio.Event, seconds: float) -> float:
        """Work until `stop` is set or the speed changes; the seconds of work that are done then."""
        loop, speed = asyncio.get_running_loop(), self._speed
        start, self._stop = loop.time(), stop
        try:
            async with asyncio.timeout(seconds / speed):
                await stop.wait()
        except TimeoutError:
            return seconds
        finally:
            self._stop = None
        return min(seconds, (loop.time() - start) * speed)

    async def work(self, seconds: float) -> None:
        """All of it, whatever happens."""
        while seconds > _LITTLE_S:
            seconds -= await self.work_until(asyncio.Event(), seconds)


class SharedCores:
    """Shares as an operating system does: each thread that is busy gets as much, but none more than it asks for.

    A party that asks for 1.2 cores has one thread that never rests, and helpers that work between its steps.
    """

    def __init__(self, num: float) -> None:
        self._num = num
        self._parties: list[BusyCores] = []

    @contextmanager
    def busy(self, asked: float) -> Iterator[BusyCores]:
        """Ask for so many cores meanwhile."""
        party = BusyCores(asked)
        self._parties.append(party)
        self._share()
        try:
            yield party
        finally:
            self._parties.remove(party)
            self._share()

    def _share(self) -> None:
        left, num_threads = self._num, sum(party.num_threads for party in self._parties)
        for party in sorted(self._parties, key=lambda party: party.asked / party.num_threads):
            given = min(party.asked, left * party.num_threads / num_threads)
            party.give(given)
            left, num_threads = left - given, num_threads - party.num_threads
