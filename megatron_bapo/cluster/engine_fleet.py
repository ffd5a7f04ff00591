"""The run's engines: which of them serve, how the lost ones are replaced, and whose turn it is on colocated GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, Self

import numpy as np

from megatron_bapo.cluster.engine_transfers import EngineTransfers, TransferEngine
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.event_loop import answered_within, own_turn
from megatron_bapo.rollout.engine import INITIAL_VERSION
from megatron_bapo.rollout.messages import EngineLost, Generated, GenerationEngine, SequenceScore
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.weight_probe import WeightProbe
from megatron_bapo.weight_sync.route import TransferGroup


class FleetEngine(GenerationEngine, TransferEngine, Protocol):
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
        transfers: EngineTransfers | None = None,
    ) -> None:
        """`record` receives an engine's name, an event (`lost`, `failed to start`, `serves`) and its reason.

        `on_failure` receives the error when an engine does not come back after `max_engine_restarts` attempts, and any
        error that ends the probing itself. `transfers` are those of a transport from GPU to GPU; otherwise an engine
        can load the current weights at any time.
        """
        self._engines = dict(engines)
        self._router = router
        self._settings = settings
        self._record = record
        self._on_failure = on_failure
        self._transfers = transfers
        self._begun: int | None = None
        """Version whose transfer has begun and has not been loaded."""
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
        if self._transfers is not None:
            self._spawn(self._transfers.lose(name, reason))
        if name not in self._replacing:
            self._replacing.add(name)
            self._spawn(self._replace(name, reason))

    @property
    def policy_version(self) -> int:
        """The version that the engines serve."""
        return self._policy_version

    async def begin_transfer(self, version: int, plan: str, broken: str) -> TransferGroup:
        """Return the group that transfers a version to the engines of `load_weights`, which comes next.

        If it is the engines' version, they are those that lack it. `plan` is the digest of the weight transfer plan,
        and `broken` the name of the last group if it has failed.
        """
        assert self._transfers is not None, "this transport has no groups"
        if self._begun != version:  # Ray may repeat the call when it has returned
            await self._weights.acquire()
            self._begun = version
            serving = {name: self._engines[name] for name in self._router.engines}
            self._transfers.begin(serving if version != self._policy_version else {}, plan, broken)
        return self._transfers.group

    async def repeat_transfer(self, group: TransferGroup, reason: str) -> TransferGroup:
        """Return the group that repeats the transfer in which `group` has failed."""
        assert self._transfers is not None, "this transport has no groups"
        return await self._transfers.repeat(group, reason)

    async def load_weights(self, version: int) -> None:
        """Load a published policy version on every engine; one that is lost meanwhile comes back with that version."""
        if self._transfers is None:
            async with self._weights:
                await self._router.on_every(lambda engine: engine.load_weights(version))
                self._policy_version = version
            return
        if self._begun != version:  # Ray has repeated the call
            return
        try:
            if version != self._policy_version:
                await asyncio.gather(self._receive(self._transfers, version), self._transfers.load_lacking(version))
            else:
                await self._transfers.load_lacking(version)
            self._policy_version = version
        finally:
            self._begun = None
            self._weights.release()

    async def _receive(self, transfers: EngineTransfers, version: int) -> None:
        named = {id(engine): (name, engine) for name, engine in self._engines.items()}
        await self._router.on_every(lambda engine: transfers.load(*named[id(engine)], version))

    async def unless_lacking(self, work: asyncio.Future[Any]) -> bool:
        """Wait until `work` is done, or until an engine needs weights from the trainer; return whether it is done."""
        if self._transfers is None:
            await asyncio.wait({work})
            return True
        lacking = asyncio.ensure_future(self._transfers.until_lacking())
        try:
            await asyncio.wait({work, lacking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lacking.cancel()
        return work.done()

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
                for name, deltas in (await self._router.on_every(self._probe)).items():
                    for request_id, delta in deltas.items():
                        async with own_turn():
                            self._router.record_partial({name: {request_id: delta}}, dispatch=False)
                    self._router.dispatch()

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
                    await self._until_served(name, engine, capacity_tokens)
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

    async def _until_served(self, name: str, engine: FleetEngine, capacity_tokens: int) -> None:
        """Load the current weights on a started engine, probe it, and add it to the router."""
        version = INITIAL_VERSION
        while True:
            async with self._weights:
                if self._transfers is None or version == self._policy_version:
                    await self._load_current_weights(engine)
                    self._router.add(name, engine, capacity_tokens)
                    return
            version = await self._transfers.bring(name, engine)

    async def _restart(self, name: str) -> tuple[FleetEngine, int]:
        engine = self._engines[name] = self._engines[name].replacement()
        try:
            return engine, await engine.started()
        except UserError as error:  # an engine has run with these settings; GPU memory may not be free yet
            raise RunError(str(error)) from error

    async def _load_current_weights(self, engine: FleetEngine) -> None:
        if self._policy_version != INITIAL_VERSION and self._transfers is None:
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
