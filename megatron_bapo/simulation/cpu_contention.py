"""CPU cores that engines and trainer share, in virtual time.

A client that requests more than its fair share of the cores runs more slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

_EPSILON_S = 1e-9


class BusyCores:
    """One client's share of the cores. Seconds of work are measured at full speed, on all requested cores."""

    def __init__(self, requested: float) -> None:
        self.requested = requested
        self.num_threads = max(1, round(requested))
        self._speed = 1.0
        self._stop: asyncio.Event | None = None

    def set_share(self, num: float) -> None:
        """Set the number of cores that the client has from now on."""
        speed = num / self.requested if self.requested > 0 else 1.0
        if speed != self._speed:
            self._speed = speed
            if self._stop is not None:
                self._stop.set()

    async def work_until(self, stop: asyncio.Event, seconds: float) -> float:
        """Work until `seconds` are done, `stop` is set or the speed changes; return the seconds of work done."""
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
        """Work until all `seconds` are done."""
        while seconds > _EPSILON_S:
            seconds -= await self.work_until(asyncio.Event(), seconds)


class SharedCores:
    """Cores shared as an operating system does: all busy threads get equal shares, none more than it requests.

    A client that requests 1.2 cores has one thread that is always busy and helper threads that work between its steps.
    """

    def __init__(self, num: float) -> None:
        self._num = num
        self._clients: list[BusyCores] = []

    @contextmanager
    def busy(self, requested: float) -> Iterator[BusyCores]:
        """Request a number of cores for the duration of the block."""
        client = BusyCores(requested)
        self._clients.append(client)
        self._share()
        try:
            yield client
        finally:
            self._clients.remove(client)
            self._share()

    def _share(self) -> None:
        left, num_threads = self._num, sum(client.num_threads for client in self._clients)
        for client in sorted(self._clients, key=lambda client: client.requested / client.num_threads):
            share = min(client.requested, left * client.num_threads / num_threads)
            client.set_share(share)
            left, num_threads = left - share, num_threads - client.num_threads
