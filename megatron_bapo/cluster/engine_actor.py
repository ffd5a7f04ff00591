"""One engine as a Ray actor: placed, called with timeouts, killed and placed again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bapo.cluster.ray_cluster import ActorDied, await_result, cancel_call, create_actor, kill
from megatron_bapo.cluster.trainer_process import kill as kill_processes
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import RunError
from megatron_bapo.event_loop import answered_within
from megatron_bapo.model.weight_layouts import engine_route
from megatron_bapo.rollout.engine import Engine, EngineFacts, engine_environment
from megatron_bapo.rollout.messages import EngineLost, Generated, GenerationRequest, SequenceScore
from megatron_bapo.run_directory import RunDirectory

_GRACE_S = 60.0
"""The engine enforces a request's timeout itself; a response that is later than this will never come."""


@dataclass(frozen=True)
class EnginePlacement:
    """Where an engine, or its replacement, runs."""

    store: Path
    """Folder of its host's weight store."""
    devices: tuple[str, ...]
    """The GPUs that are visible to it."""
    node_id: str | None = None
    """None for a run on a single machine."""
    agent: Any = None
    """Handle of the `NodeAgent` on its machine, where that may be another machine."""


class EngineActor:
    """A Ray actor as the router and the fleet see an engine; every wait has a timeout."""

    def __init__(self, config: Config, index: int, placement: EnginePlacement, num_restarts: int = 0) -> None:
        """Start the actor without waiting for it; `index` decides which weights and which log file are its own.

        Raises RunError for a restarted engine that could not get the current weights.
        """
        transport = config.weight_sync.transport
        if num_restarts and transport != "store":
            raise RunError(f"weight_sync.transport={transport} keeps no weights for a new engine; transport=store does")
        self.name = f"engine {index}"
        self._config, self._settings = config, config.rollout
        self._index, self._placement, self._num_restarts = index, placement, num_restarts
        self._facts: EngineFacts | None = None
        actor_name = f"{self.name} restart {num_restarts}" if num_restarts else self.name
        log_file = RunDirectory(config.run_dir).logs / f"{actor_name.replace(' ', '-')}.log"
        routes = config.algorithm.routing_replay == "rollout"
        environment = engine_environment(
            placement.devices, batch_invariant=config.rollout.batch_invariant, return_routes=routes
        )
        self.handle = create_actor(
            Engine, log_file, name=actor_name, environment=environment, node_id=placement.node_id
        )
        self.start_call = self.handle.start.remote(
            config.model_path.absolute(),
            config.rollout,
            config.model.dtype,
            max_model_len=config.max_model_len,
            seed=config.seed,
            route=engine_route(config, placement.store, index),
            return_routes=routes,
        )
        """Reference that is ready when the engine has started."""

    async def started(self) -> int:
        """Wait until the engine serves the initial model; returns the size of its KV cache in tokens."""
        facts: EngineFacts = await self._call(self.start_call, self._settings.start_timeout_s)
        self._facts = facts
        return facts.kv_cache_tokens

    def replacement(self) -> EngineActor:
        """Kill what is left of this engine and start another one on the same GPUs, without waiting for it."""
        self._kill()
        return EngineActor(self._config, self._index, self._placement, self._num_restarts + 1)

    async def generate(self, request: GenerationRequest) -> Generated:
        """Send a request; a cancelled call ends when the engine has released the request."""
        call = self.handle.generate.remote(request)
        try:
            return await self._call(call, self._settings.request_timeout_s + _GRACE_S)
        except asyncio.CancelledError:
            with suppress(TimeoutError):
                async with answered_within(self._settings.health_check_timeout_s):
                    await cancel_call(call)
            raise

    async def score(self, token_ids: np.ndarray, num_decoded: int) -> SequenceScore:
        call = self.handle.score.remote(token_ids, num_decoded)
        return await self._call(call, self._settings.health_check_timeout_s)

    async def abort(self) -> None:
        await self._call(self.handle.abort.remote(), self._settings.health_check_timeout_s)

    async def load_weights(self, version: int) -> None:
        """Load a policy version while probing the engine, which nobody else does meanwhile."""
        settings = self._settings
        loading = asyncio.ensure_future(self._call(self.handle.load_weights.remote(version), settings.start_timeout_s))
        try:
            while not (await asyncio.wait({loading}, timeout=settings.health_check_interval_s))[0]:
                await self.progress()
            await loading
        finally:
            loading.cancel()

    async def sleep(self, level: int) -> None:
        await self._call(self.handle.sleep.remote(level), self._settings.start_timeout_s)

    async def wake(self, tags: tuple[str, ...]) -> None:
        await self._call(self.handle.wake.remote(tags), self._settings.start_timeout_s)

    async def progress(self) -> dict[str, Generated]:
        return await self._call(self.handle.progress.remote(), self._settings.health_check_timeout_s)

    def _kill(self) -> None:
        kill(self.handle)
        # A stopped process cannot end itself, and vLLM's own processes outlive a killed engine.
        if self._facts is None:
            return
        if self._placement.agent is None:
            kill_processes(self._facts.processes)
        else:
            self._placement.agent.kill.remote(self._facts.processes)

    async def _call(self, reference: Awaitable[Any], timeout_s: float) -> Any:
        return await engine_result(reference, self.name, timeout_s)


async def engine_result(reference: Awaitable[Any], name: str, timeout_s: float) -> Any:
    """Return what the engine `name` replies to a call; raises EngineLost where it does not, or not in time."""
    try:
        async with answered_within(timeout_s):
            return await await_result(reference, name)
    except TimeoutError:
        raise EngineLost(f"{name} did not answer within {timeout_s:.0f} s") from None
    except ActorDied as error:
        raise EngineLost(str(error)) from error
