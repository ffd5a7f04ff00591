"""Probes the engines and replaces those that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from megatron_bapo.errors import RunError
from megatron_bapo.rollout.messages import EngineLost, Generated, GenerationEngine
from megatron_bapo.rollout.router import Router


class Fleet(Protocol):
    """Who places engines. Bounds its own waits; raises RunError when an engine does not come up or does not load."""

    async def restart(self, name: str) -> tuple[GenerationEngine, int]:
        """A new engine under this name, and the tokens that its cache holds."""
        ...

    async def load_current_weights(self, engine: GenerationEngine) -> None: ...


class EngineHealth:
    """Watches the engines of a router. An engine that is lost comes back only with the current weights."""

    def __init__(
        self,
        router: Router,
        fleet: Fleet,
        record: Callable[[str, str, str], None],
        on_failure: Callable[[RunError], None],
        *,
        interval_s: float,
        timeout_s: float,
        max_restarts: int,
    ) -> None:
        """`record` is told the name of an engine, what happened to it (`lost`, `failed to start`, `serves`), and why;
        `on_failure` when an engine does not come back after `max_restarts` attempts."""
        self._router = router
        self._fleet = fleet
        self._record = record
        self._on_failure = on_failure
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._max_restarts = max_restarts
        self._tasks: set[asyncio.Task[None]] = set()
        self._replacing: set[str] = set()
        self.weights = asyncio.Lock()
        """Held while weights change: no probe is sent, and no new engine starts to serve with those of before."""
        self._turn = asyncio.Condition()
        self._is_trainers_turn = False
        self._num_starting = 0
        self.num_restarts = 0

    def start(self) -> None:
        self._spawn(self._probe_for_ever())

    def on_lost(self, name: str, reason: str) -> None:
        """The router has taken an engine out; bring it back."""
        if name not in self._replacing:
            self._replacing.add(name)
            self._spawn(self._bring_back(name, reason))

    async def to_trainer(self) -> None:
        """The trainer has the engines' GPUs next; returns when no engine starts there, and none will."""
        async with self._turn:
            self._is_trainers_turn = True
            await self._turn.wait_for(lambda: not self._num_starting)

    async def to_engines(self) -> None:
        """Engines have their GPUs again, also those that start."""
        async with self._turn:
            self._is_trainers_turn = False
            self._turn.notify_all()

    async def close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            async with self.weights:
                self._router.keep(await self._router.on_every(self._probe))

    async def _probe(self, engine: GenerationEngine) -> dict[str, Generated]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await engine.progress()
        except TimeoutError:
            raise EngineLost(f"it did not answer a probe within {self._timeout_s:.0f} s") from None
        except RunError as error:
            raise EngineLost(str(error)) from error

    async def _bring_back(self, name: str, reason: str) -> None:
        self._record(name, "lost", reason)
        for attempt in range(1, self._max_restarts + 1):
            try:
                async with self._starting():
                    engine, capacity_tokens = await self._fleet.restart(name)
                    async with self.weights:
                        await self._fleet.load_current_weights(engine)
                        self._router.add(name, engine, capacity_tokens)
            except RunError as error:
                self._record(name, "failed to start", str(error))
                if attempt == self._max_restarts:
                    message = f"{name} was lost ({reason}) and did not come back in {attempt} attempts: {error}"
                    self._on_failure(RunError(message))
            else:
                self.num_restarts += 1
                self._record(name, "serves", f"attempt {attempt}")
                break
        self._replacing.discard(name)

    @asynccontextmanager
    async def _starting(self) -> AsyncIterator[None]:
        """In the engines' turn, which lasts until this is left."""
        async with self._turn:
            await self._turn.wait_for(lambda: not self._is_trainers_turn)
            self._num_starting += 1
        try:
            yield
        finally:
            async with self._turn:
                self._num_starting -= 1
                self._turn.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
