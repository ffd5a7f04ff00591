"""One engine as a Ray actor: placed, called with timeouts, killed and placed again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bapo.cluster.ray_cluster import ActorDied, await_result, cancel_call, create_actor, head_address, kill
from megatron_bapo.cluster.trainer_process import LOOPBACK
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import RunError
from megatron_bapo.event_loop import answered_within
from megatron_bapo.model.weight_layouts import engine_places, engine_route
from megatron_bapo.rollout.engine import Engine, engine_environment
from megatron_bapo.rollout.engine_nodes import ENGINE_MARK, EngineFollower, kill_marked, node_environment
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.messages import EngineLost, Generated, GenerationRequest, SequenceScore
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.weight_sync.route import NUM_ATTEMPTS, TransferGroup

_GRACE_S = 60.0
"""The engine enforces a request's timeout itself; a response that is later than this will never come."""


@dataclass(frozen=True)
class EnginePlacement:
    """Where the ranks of an engine on one node, or those of its replacement, run."""

    store: Path
    """Folder of the node's weight store."""
    devices: tuple[str, ...]
    """The GPUs that are visible to them."""
    address: str = LOOPBACK
    """The node's address, on which ranks listen for those of other nodes."""
    network: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that select the network interface with this address."""
    node_id: str | None = None
    """None for a run on a single machine."""
    agent: Any = None
    """Handle of the `NodeAgent` on the node, where that may be another machine."""

    def kill_engine(self, mark: str) -> None:
        """Kill an engine's processes on this node; does not wait where it is another machine."""
        if self.agent is None:
            kill_marked(mark)
        else:
            self.agent.kill_engine.remote(mark)


class EngineActor:
    """The Ray actors of one engine as the router and the fleet see it; every wait has a timeout.

    An engine on several nodes has an actor with vLLM's core on the first node and a follower on each other node. It is
    one engine: if a part is lost, all parts are replaced.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        placements: Sequence[EnginePlacement],
        num_restarts: int = 0,
        *,
        is_teacher: bool = False,
    ) -> None:
        """Start the actors without waiting for them; `index` decides which weights and which log files are its own.

        `placements` has an element for each of the engine's nodes. An engine that `is_teacher` only scores, at the
        temperature of `config`, which is that of the teacher's engines. Raises RunError for a restarted engine that
        could not get the current weights.
        """
        transport = config.weight_sync.transport
        if num_restarts and transport == "cuda_ipc":
            raise RunError(f"weight_sync.transport={transport} keeps no weights for a new engine; transport=store does")
        self.name = f"{'teacher' if is_teacher else 'engine'} {index}"
        self._config, self._settings = config, config.rollout
        self._index, self._placements, self._num_restarts = index, tuple(placements), num_restarts
        self._is_teacher = is_teacher
        self._mark = secrets.token_hex(8)
        self.places = tuple(engine_places(config, index))
        first, others = self._placements[0], self._placements[1:]
        self.handle = self._create(Engine, first)
        spec = EngineSpec.of(config)
        if is_teacher:
            spec = replace(spec, scoring_temperature=config.rollout.temperature)
        endpoint: Any = ""
        if others:
            endpoint = self.handle.meet.remote(first.address, config.rollout.start_timeout_s)
        nodes = [(node.store, node.address) for node in self._placements]
        route = engine_route(config, index, nodes, f"ray://{head_address()}")
        self.start_call = self.handle.start.remote(spec, route, endpoint)
        """Reference that is ready when the engine has started."""
        self._followers = {
            f"{self.name} on its node {node + 1}": self._create(EngineFollower, other, node)
            for node, other in enumerate(others, start=1)
        }
        self._follower_calls = {
            name: follower.start.remote(spec, other.store, node, endpoint)
            for (name, follower), (node, other) in zip(self._followers.items(), enumerate(others, start=1), strict=True)
        }

    def _create(self, actor_class: type, placement: EnginePlacement, node: int = 0) -> Any:
        name = f"{self.name} restart {self._num_restarts}" if self._num_restarts else self.name
        name += f" node {node + 1}" * bool(node)
        log_file = RunDirectory(self._config.run_dir).logs / f"{name.replace(' ', '-')}.log"
        environment = engine_environment(
            placement.devices,
            batch_invariant=self._settings.batch_invariant,
            second_model_runner=self._config.algorithm.replays_rollout,
        )
        environment[ENGINE_MARK] = self._mark
        if self._config.weight_sync.transport == "nccl":  # its ranks connect to those of other hosts
            environment |= {name: value for name, value in placement.network.items() if name.startswith("NCCL_")}
        if len(self._placements) > 1:
            environment |= {**placement.network, **node_environment(placement.address)}
        return create_actor(actor_class, log_file, name=name, environment=environment, node_id=placement.node_id)

    @property
    def handles(self) -> list[Any]:
        """Handles of all actors; an actor lives as long as its handle."""
        return [self.handle, *self._followers.values()]

    @property
    def starting(self) -> dict[str, Any]:
        """References that are ready when an actor has started, by name."""
        return {self.name: self.start_call, **self._follower_calls}

    async def started(self) -> int:
        """Wait until the engine serves the initial model; returns the size of its KV cache in tokens."""
        # A follower that does not start is the reason why the others wait for it.
        limit_s = self._settings.start_timeout_s
        calls = [asyncio.ensure_future(engine_result(call, name, limit_s)) for name, call in self.starting.items()]
        try:
            facts, *_ = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return facts.kv_cache_tokens

    def replacement(self) -> EngineActor:
        """Kill what is left of this engine and start another one on the same GPUs, without waiting for it."""
        self._kill()
        num_restarts = self._num_restarts + 1
        return EngineActor(self._config, self._index, self._placements, num_restarts, is_teacher=self._is_teacher)

    async def generate(self, request: GenerationRequest) -> Generated:
        """Send a request; a cancelled call ends when the engine has released the request."""
        call = self.handle.generate.remote(request)
        try:
            reply: Generated = await self._call(call, self._settings.request_limit_s + _GRACE_S)
            # Ray's views would occupy its object store until the whole group has ended.
            return reply.with_own_arrays()
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

    async def load_weights(self, version: int, group: TransferGroup | None = None) -> None:
        """Load a policy version while probing the engine, which nobody else does meanwhile.

        `group` is the one that transfers the version, for a transport that needs one.
        """
        settings = self._settings
        # A group waits for each of its ranks up to this time, and may be repeated.
        limit_s = settings.start_timeout_s * (1 if group is None else NUM_ATTEMPTS)
        loading = asyncio.ensure_future(self._call(self.handle.load_weights.remote(version, group), limit_s))
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
        """Return what `Engine.progress` does. Raises EngineLost also if a rank on another node has ended."""
        checks = [
            engine_result(follower.check.remote(), name, self._settings.health_check_timeout_s)
            for name, follower in self._followers.items()
        ]
        delta, *_ = await asyncio.gather(self._progress(), *checks)
        return delta

    async def _progress(self) -> dict[str, Generated]:
        return await self._call(self.handle.progress.remote(), self._settings.health_check_timeout_s)

    def _kill(self) -> None:
        for handle in self.handles:
            kill(handle)
        # A stopped process cannot end itself, and vLLM's own processes outlive a killed engine.
        for placement in self._placements:
            placement.kill_engine(self._mark)

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
