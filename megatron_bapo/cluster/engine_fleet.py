"""The run's engines: which of them serve, how the lost ones are replaced, and whose turn it is on colocated GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self

import numpy as np

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.event_loop import answered_within
from megatron_bapo.rollout.engine import INITIAL_VERSION
from megatron_bapo.rollout.messages import EngineLost, Generated, GenerationEngine, SequenceScore
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.weight_probe import WeightProbe


class FleetEngine(GenerationEngine, Protocol):
    """An engine that the fleet can replace. Every method bounds its own waits."""

    name: str

    async def started(self) -> int:
        """Wait until the engine serves the initial model; returns the size of its KV cache in tokens.

        Raises RunError when it does not start, UserError when vLLM refuses its settings.
        """
        ...

    def replacement(self) -> Self:
        """Kill what is left of this engine and start another one in its place, without waiting for it.

        Raises RunError when no other engine could join the run.
        """
        ...

    async def score(self, token_ids: np.ndarray, num_decoded: int) -> SequenceScore: ...


class EngineFleet:
    """Probes the engines of a router and replaces the lost ones; a replacement serves only the current weights."""

    def __init__(
        self,
        engines: Mapping[str, FleetEngine],
        router: Router,
        settings: RolloutConfig,
        record: Callable[[str, str, str], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`record` receives an engine's name, an event (`lost`, `failed to start`, `serves`) and its reason.

        `on_failure` receives the error when an engine does not come back after `max_engine_restarts` attempts, and any
        error that ends the probing itself.
        """
        self._engines = dict(engines)
        self._router = router
        self._settings = settings
        self._record = record
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self._replacing: set[str] = set()
        self._weights = asyncio.Lock()
        """Held during a weight update: no probe is sent and no replacement starts to serve meanwhile."""
        self._policy_version = INITIAL_VERSION
        self._weight_probe: WeightProbe | None = None
        self._turn = asyncio.Condition()
        self._is_trainers_turn = False
        self._num_starting = 0
        self._started = False
        self.num_restarts = 0

    async def start(self) -> None:
        """Wait until every engine serves the initial model, then begin to probe them. A second call does nothing."""
        if self._started:
            return
        self._started = True
        capacities = await asyncio.gather(*(engine.started() for engine in self._engines.values()))
        for (name, engine), capacity_tokens in zip(self._engines.items(), capacities, strict=True):
            self._router.add(name, engine, capacity_tokens)
        self._spawn(self._probe_forever())

    def on_lost(self, name: str, reason: str) -> None:
        """Replace an engine that the router has removed."""
        if name not in self._replacing:
            self._replacing.add(name)
            self._spawn(self._replace(name, reason))

    async def load_weights(self, version: int) -> None:
        """Load a published policy version on every engine; one that is lost meanwhile comes back with that version."""
        async with self._weights:
            await self._router.on_every(lambda engine: engine.load_weights(version))
            self._policy_version = version

    def require(self, probe: WeightProbe) -> None:
        """Replacements must pass this weight probe before they serve, as long as its policy version is the current."""
        self._weight_probe = probe

    async def to_trainer(self) -> None:
        """Give the engines' GPUs to the trainer; returns when no engine is starting there, and none will start."""
        async with self._turn:
            self._is_trainers_turn = True
            await self._turn.wait_for(lambda: not self._num_starting)

    async def to_engines(self) -> None:
        """Give the GPUs back to the engines; replacements may start again."""
        async with self._turn:
            self._is_trainers_turn = False
            self._turn.notify_all()

    async def close(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.health_check_interval_s)
            async with self._weights:
                for name, delta in (await self._router.on_every(self._probe)).items():
                    self._router.record_partial({name: delta})
                    await asyncio.sleep(0)  # an engine for each turn of the event loop

    async def _probe(self, engine: GenerationEngine) -> dict[str, Generated]:
        timeout_s = self._settings.health_check_timeout_s
        try:
            async with answered_within(timeout_s):
                return await engine.progress()
        except TimeoutError:
            raise EngineLost(f"it did not answer a probe within {timeout_s:.0f} s") from None
        except RunError as error:
            raise EngineLost(str(error)) from error

    async def _replace(self, name: str, reason: str) -> None:
        self._record(name, "lost", reason)
        for attempt in range(1, self._settings.max_engine_restarts + 1):
            try:
                async with self._starting():
                    engine, capacity_tokens = await self._restart(name)
                    async with self._weights:
                        await self._load_current_weights(engine)
                        self._router.add(name, engine, capacity_tokens)
            except RunError as error:
                self._record(name, "failed to start", str(error))
                if attempt == self._settings.max_engine_restarts:
                    message = f"{name} was lost ({reason}) and did not come back in {attempt} attempts: {error}"
                    self._on_failure(RunError(message))
            else:
                self.num_restarts += 1
                self._record(name, "serves", f"attempt {attempt}")
                break
        self._replacing.discard(name)

    async def _restart(self, name: str) -> tuple[FleetEngine, int]:
        engine = self._engines[name] = self._engines[name].replacement()
        try:
            return engine, await engine.started()
        except UserError as error:  # an engine has run with these settings; GPU memory may not be free yet
            raise RunError(str(error)) from error

    async def _load_current_weights(self, engine: FleetEngine) -> None:
        if self._policy_version != INITIAL_VERSION:
            await engine.load_weights(self._policy_version)
        probe = self._weight_probe
        if probe is not None and probe.policy_version == self._policy_version:
            probe.difference(engine.name, await engine.score(probe.token_ids, probe.num_decoded))

    @asynccontextmanager
    async def _starting(self) -> AsyncIterator[None]:
        """Wait for the engines' turn on the GPUs, which then lasts until this context ends."""
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
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)
