"""One vLLM engine: samples, scores, loads new weights between requests, and sleeps while the trainer needs its GPU.

The rollout plane runs it as a Ray actor; this file is plain asyncio. The engine serves nothing while weights load and
after a load that failed, so that no response comes from unknown weights.

    serving ──sleep(1)──► asleep ──wake(weights)──► may load weights ───wake(kv_cache)──► serving
    serving ──sleep(2)──► asleep ──wake(weights)──► must load weights ──wake(kv_cache)──► serving

Ray sends a call again when its connection was interrupted, and runs it after the first one, which goes on meanwhile
(unordered_actor_task_execution_queue.cc in Ray's source). So a call that changes the engine has no effect if the engine
is already as it asks, and responses are kept for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from megatron_bapo.config.schema import Config
from megatron_bapo.errors import RunError
from megatron_bapo.garbage_collection import collector_paused
from megatron_bapo.logs import redirect_output
from megatron_bapo.rollout.engine_nodes import Meeting, StartedRanks, own_processes, unlink_shared_memory
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.messages import EngineLost, Generated, GenerationRequest, SequenceScore
from megatron_bapo.weight_sync.route import TransferGroup, WeightRoute

if TYPE_CHECKING:
    from megatron_bapo.rollout.vllm_adapter import VllmServer

INITIAL_VERSION = 0
"""Policy version of the checkpoint that an engine starts from."""
MEMORY = ("weights", "kv_cache")
"""vLLM's tags of the memory that a sleeping engine frees; the KV cache is freed along with the weights."""
KEPT_S = 60.0
"""Time for which responses are kept; Ray gives up sending a call again after about 30 s."""


def engine_devices(config: Config, slot: int, num_trainer_ranks: int, devices: Sequence[str]) -> list[str]:
    """Return the GPUs of a machine that are visible to an engine, its own GPUs first.

    `slot` is the engine's index among the machine's engines; the machine also has `num_trainer_ranks` trainer ranks.
    vLLM uses the first visible GPUs. A colocated engine sees the others, too, because it may read parameters from them.
    """
    if not devices:
        return []
    num_ranks = config.rollout.ranks_per_engine_node
    first = slot * num_ranks + (0 if config.rollout.colocate else num_trainer_ranks)
    own = list(devices[first : first + num_ranks])
    return own + [device for device in devices if config.rollout.colocate and device not in own]


def engine_environment(
    devices: Sequence[str] = (), *, batch_invariant: bool = False, second_model_runner: bool = False
) -> dict[str, str]:
    """Return the environment variables of an engine's process; without `devices` it runs on the CPU.

    On GPUs only the second version of vLLM's model runner returns routes and the tokens that sampling has kept.
    """
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if devices:
        # Without the second variable Ray would hide all GPUs from an actor that requests none.
        return environment | {
            "CUDA_VISIBLE_DEVICES": ",".join(devices),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "VLLM_BATCH_INVARIANT": str(int(batch_invariant)),
            **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if second_model_runner else {}),
        }
    return environment | {
        # One thread without core binding: engine and trainer share the cores.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # The engine core runs in this process (vllm/platforms/cpu.py).
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Compiling the sampler's one compiled function takes longer than a small run spends in the sampler.
        "TORCHDYNAMO_DISABLE": "1",
    }


@dataclass(frozen=True)
class EngineFacts(StartedRanks):
    """Properties of a started engine, and its processes on its first node."""

    kv_cache_tokens: int
    """Size of its KV cache in tokens."""


class Engine:
    """Owns one vLLM server and knows the policy version of its weights."""

    def __init__(self, log_file: Path | None = None) -> None:
        """`log_file` receives the output of this process and of vLLM's processes, if given."""
        if log_file is not None:
            redirect_output(log_file)
        self._server: VllmServer | None = None
        self._facts: EngineFacts | None = None
        self._meeting: Meeting | None = None
        self._policy_version: int | None = None
        self._newest_version = INITIAL_VERSION
        self._loaded_bytes: int | None = None
        """Bytes read by the latest load."""
        self._asleep: tuple[str, ...] = ()
        self._sleep_level = 0
        self._weights_discarded = False
        self._is_occupied = False
        """Whether vLLM's core loads weights, falls asleep or wakes up; it replies to other calls only after that."""
        self._failure: str | None = None
        """Why the engine will never serve again."""
        self._num_in_flight = 0
        self._kept: dict[tuple[int | None, str], Generated] = {}
        """Latest responses by policy version and request id, in case Ray sends their requests again."""

    async def meet(self, address: str, timeout_s: float) -> str:
        """Open the store where this engine's ranks on several nodes meet; return its HOST:PORT.

        `address` is this node's address, and `timeout_s` limits the start of all ranks. Comes before `start`.
        """
        if self._meeting is None:
            self._meeting = Meeting(address, timeout_s)
        return self._meeting.endpoint

    async def start(self, spec: EngineSpec, route: WeightRoute, endpoint: str = "") -> EngineFacts:
        """Load the checkpoint and serve it as policy version 0.

        `endpoint` is what `meet` has returned, for an engine on several nodes. Raises UserError for settings that vLLM
        refuses, RunError if its processes do not start. A second call returns what the first one did.
        """
        if self._facts is not None:
            return self._facts
        with collector_paused():  # these import torch, and the rollout service imports this file without it
            from megatron_bapo.rollout.vllm_adapter import VllmServer
            from megatron_bapo.rollout.weight_sources import check_complete, version_shapes

        self._server = VllmServer(spec, route.folder, endpoint)
        self._timeout_s = spec.settings.request_limit_s
        await self.connect(route)
        if spec.scoring_temperature is not None:
            await self._server.divide_logits(spec.scoring_temperature)
        expected = version_shapes(spec.model_path, spec.adapters)
        self._check_complete = partial(check_complete, expected=expected)
        self._policy_version = INITIAL_VERSION
        self._facts = EngineFacts(own_processes(), self._server.kv_cache_tokens)
        unlink_shared_memory(self._facts.processes)
        return self._facts

    async def connect(self, route: WeightRoute) -> None:
        """Set the route of all following weight updates."""
        assert self._server is not None, "start comes first"
        self._route = route
        await self._server.connect(route)

    async def generate(self, request: GenerationRequest) -> Generated:
        """Sample `n` completions; the same request under the same weights gives the same completions.

        On GPUs this needs `rollout.batch_invariant`, because rounding depends on the other requests of a batch.
        A request that is sent again within `KEPT_S` gets what was generated for it, unless it was aborted.
        """
        if (kept := self._kept.get((self._policy_version, request.request_id))) is not None:
            return kept
        (generated,) = await self.generate_many([request])
        if all(completion.finish_reason != "abort" for completion in generated.completions):
            key = generated.policy_version, request.request_id
            self._kept[key] = generated
            asyncio.get_running_loop().call_later(KEPT_S, self._kept.pop, key, None)
        return generated

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generated]:
        """Serve a batch of requests; the outputs are in the order of the requests.

        Raises EngineLost if vLLM's core has ended, RunError if there are no known weights to serve, if vLLM fails
        otherwise, or if `request_timeout_s` passes.
        """
        async with self._serving(f"{len(requests)} prompts from {requests[0].request_id} on") as (server, version):
            return [Generated(version, completions) for completions in await server.generate(requests)]

    async def score(self, token_ids: np.ndarray, num_decoded: int = 0) -> SequenceScore:
        """Return the log-probs of a sequence [S], and of `num_decoded` tokens that are sampled after it.

        Together they are shorter than `max_model_len`. Raises as `generate_many`.
        """
        async with self._serving("a score request") as (server, version):
            if not num_decoded:
                return SequenceScore(version, await server.score(token_ids))
            sampled, decoded = await server.decode(token_ids, num_decoded)
            log_probs, rescored = np.split(
                await server.score(np.concatenate([token_ids, sampled])), [len(token_ids) - 1]
            )
            return SequenceScore(version, log_probs, decoded, rescored)

    async def abort(self) -> None:
        """Abort every request in flight, those that arrive meanwhile included; each returns the tokens so far.

        Raises EngineLost if vLLM does not.
        """
        server, _ = self._running()
        async with self._must_succeed("the requests were not aborted"):
            await server.abort()

    async def progress(self) -> dict[str, Generated]:
        """Return, by request id, the tokens of requests in flight since the last call; works as a health check.

        vLLM's processes are probed also while the engine sleeps, but not while weights load, or it falls asleep or
        wakes up. Raises EngineLost if they have ended, or if a load has failed.
        """
        if self._is_occupied:
            return {}
        self._refuse_after_failure()
        server = self._server if self._asleep else self._running()[0]
        assert server is not None, "an engine that sleeps was started"
        await server.check_health()
        version = self._policy_version
        return (
            {name: Generated(version, delta) for name, delta in server.progress().items()}
            if version is not None
            else {}
        )

    async def load_weights(self, version: int, group: TransferGroup | None = None) -> int:
        """Load a policy version from the route; return the bytes that vLLM's workers read.

        `group` is the one that transfers the version, for a transport that needs one.
        Raises RunError and keeps serving the current weights if the version is older, is missing, damaged or of
        another model, or while requests are in flight. Raises EngineLost and stops serving for good if the load itself
        fails.
        """
        server, current = self._loadable()
        if version == current and self._loaded_bytes is not None:
            return self._loaded_bytes
        if version <= self._newest_version:
            raise RunError(
                f"the engine has policy version {self._newest_version}; it does not go back to version {version}"
            )
        self._refuse_in_flight(f"load policy version {version}")
        self._check_complete(self._route, version, group)
        self._policy_version, self._weights_discarded = None, False
        async with self._occupied(f"policy version {version} was not loaded"):
            num_bytes = await self._verify(server, version, current, group)
            await server.load(version)
        self._policy_version = self._newest_version = version
        self._loaded_bytes = num_bytes
        return num_bytes

    async def _verify(self, server: VllmServer, version: int, current: int | None, group: TransferGroup | None) -> int:
        try:
            return await server.verify(version, group)
        except EngineLost:
            raise
        except RunError as error:
            # The workers' weights are unchanged.
            self._policy_version, self._weights_discarded = current, current is None
            raise RunError(
                f"policy version {version} was not loaded, the engine keeps version {current}: {error}"
            ) from error

    async def sleep(self, level: Literal[1, 2]) -> None:
        """Free this engine's GPU memory; after level 2 it must load weights before it serves again.

        Has no effect on an engine that sleeps at this level. Raises RunError while requests are in flight, EngineLost
        if vLLM fails.
        """
        if self._failure is None and self._asleep == MEMORY and self._sleep_level == level:
            return
        server, _ = self._running()
        self._refuse_in_flight("let the engine sleep")
        self._asleep, self._sleep_level = MEMORY, level
        if level == 2:
            self._policy_version, self._weights_discarded = None, True
        async with self._occupied(f"the memory was not freed (sleep level {level})"):
            await server.sleep(level)

    async def wake(self, tags: Sequence[str] = MEMORY) -> None:
        """Allocate the memory of `tags` again; has no effect on memory that is allocated.

        Raises EngineLost if vLLM fails.
        """
        waking = [tag for tag in self._asleep if tag in tags]
        if self._server is None or not waking:
            return
        async with self._occupied(f"the engine did not wake up ({', '.join(waking)})"):
            await self._server.wake(waking)
        self._asleep = tuple(tag for tag in self._asleep if tag not in waking)

    async def shutdown(self) -> None:
        """End vLLM's processes."""
        self._policy_version = None
        if self._server is not None:
            self._server.shutdown()

    def _running(self) -> tuple[VllmServer, int]:
        self._refuse_after_failure()
        if self._asleep:
            raise RunError(f"the engine sleeps: it has no memory for {' and '.join(self._asleep)}; wake it first")
        if self._weights_discarded:
            raise RunError("the engine has slept at level 2, which discards its weights; load a policy version first")
        if self._server is None or self._policy_version is None:
            raise RunError(
                "the engine has no known weights: it is not started, or it loads a policy version; wait until it has"
            )
        return self._server, self._policy_version

    def _loadable(self) -> tuple[VllmServer, int | None]:
        """Return the server and its policy version, None if sleep has discarded the weights."""
        self._refuse_after_failure()
        if "weights" in self._asleep:
            raise RunError("the engine sleeps: it has no memory for weights; wake it first")
        if self._server is not None and (self._weights_discarded or self._policy_version is not None):
            return self._server, self._policy_version
        return self._running()

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise EngineLost(f"the engine has no known weights ({self._failure}); start a new one")

    def _refuse_in_flight(self, purpose: str) -> None:
        if self._num_in_flight:
            raise RunError(f"calls in flight: {self._num_in_flight}; {purpose} after they have returned")

    @asynccontextmanager
    async def _occupied(self, failure: str) -> AsyncIterator[None]:
        """Occupy vLLM's core, which nobody probes meanwhile; raises as `_must_succeed`."""
        self._is_occupied = True
        try:
            async with self._must_succeed(failure):
                yield
        finally:
            self._is_occupied = False

    @asynccontextmanager
    async def _must_succeed(self, failure: str) -> AsyncIterator[None]:
        """Stop serving for good, and raise EngineLost, if vLLM fails or does not reply in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            reason = f"vLLM did not reply within rollout.request_timeout_s={self._timeout_s:.0f}"
        except EngineLost as error:
            reason = str(error)
        else:
            return
        self._failure = f"{failure}, the engine stops serving: {reason}"
        raise EngineLost(self._failure)

    @asynccontextmanager
    async def _bounded(self, failure: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise RunError(f"vLLM {failure} within rollout.request_timeout_s={self._timeout_s:.0f}") from None

    @asynccontextmanager
    async def _serving(self, what: str) -> AsyncIterator[tuple[VllmServer, int]]:
        server, version = self._running()
        self._num_in_flight += 1
        try:
            async with self._bounded(f"did not answer {what}"):
                yield server, version
        finally:
            self._num_in_flight -= 1
