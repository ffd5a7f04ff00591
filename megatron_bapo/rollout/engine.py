"""One vLLM engine: samples, scores, and takes over new weights between batches.

The controller places it as an actor; here it is plain asyncio. While weights load, and after a load that failed, it
serves nothing: no answer is ever of unknown weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
from safetensors import safe_open

from megatron_bapo.config.schema import RolloutConfig
from megatron_bapo.errors import RunError
from megatron_bapo.logs import redirect_output
from megatron_bapo.rollout.messages import Generated, GenerationRequest, SequenceScore
from megatron_bapo.weight_sync.transport import WeightStore

if TYPE_CHECKING:
    from megatron_bapo.rollout.vllm_adapter import VllmServer

INITIAL_VERSION = 0
"""The policy version of the checkpoint that an engine starts from."""


def engine_environment(has_gpu: bool) -> dict[str, str]:
    """Environment variables that the engine's process must be started with."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if has_gpu:
        return environment
    return environment | {
        # One thread, wherever the scheduler puts it: engine and trainer share the cores.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # No worker process between engine core and model (vllm/platforms/cpu.py).
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The sampler's one compiled function spends longer in the C++ compiler than a small run in the sampler.
        "TORCHDYNAMO_DISABLE": "1",
    }


@dataclass(frozen=True)
class EngineFacts:
    """What others need to know of an engine that has started."""

    kv_cache_tokens: int
    """Tokens whose keys and values fit its memory."""
    processes: tuple[tuple[int, float], ...]
    """Process id and start time of its own process and vLLM's."""


class Engine:
    """Owns one vLLM server and knows which weights it has."""

    def __init__(self, log_file: Path | None = None) -> None:
        """`log_file` receives everything that this process and vLLM's own print; without it they print here."""
        if log_file is not None:
            redirect_output(log_file)
        self._server: VllmServer | None = None
        self._policy_version: int | None = None
        self._num_in_flight = 0

    async def start(
        self, model_path: Path, settings: RolloutConfig, dtype: str, max_model_len: int, seed: int, store_folder: Path
    ) -> EngineFacts:
        """Load the checkpoint and get ready to serve it as policy version 0.

        `max_model_len` counts prompt and response. Raises UserError for settings that vLLM refuses, RunError when its
        processes do not come up.
        """
        from megatron_bapo.rollout.vllm_adapter import VllmServer

        self._server = VllmServer(model_path, settings, dtype, max_model_len, seed)
        self._timeout_s = settings.request_timeout_s
        self._store = WeightStore(store_folder)
        self._expected_shapes = _checkpoint_shapes(model_path)
        self._policy_version = INITIAL_VERSION
        me = psutil.Process()
        processes = tuple((process.pid, process.create_time()) for process in [me, *me.children(recursive=True)])
        return EngineFacts(self._server.kv_cache_tokens, processes)

    async def generate(self, request: GenerationRequest) -> Generated:
        """Sample `n` completions; the same request under the same weights gets the same answer."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generated]:
        """Answer a batch of requests, in order.

        Raises RunError when there are no known weights to serve, vLLM fails, or `request_timeout_s` passes.
        """
        async with self._serving(f"{len(requests)} prompts from {requests[0].request_id} on") as (server, version):
            return [Generated(version, completions) for completions in await server.generate(requests)]

    async def score(self, token_ids: np.ndarray) -> SequenceScore:
        """Log-probs of a given sequence [S], which must be shorter than `max_model_len`; errors as `generate_many`."""
        async with self._serving("a score request") as (server, version):
            return SequenceScore(version, await server.score(token_ids))

    async def abort(self) -> None:
        """Let go of every request in flight; each is answered with the tokens that it has."""
        server, _ = self._running()
        await server.abort()

    async def alive(self) -> None:
        """Return when vLLM's processes answer; raises RunError when they have failed."""
        server, _ = self._running()
        await server.check_health()

    async def load_weights(self, version: int) -> int:
        """Take over a committed version from the store; the bytes that vLLM's workers read there.

        Raises RunError, and serves on, for a version that is not newer, not committed, damaged or not of this model,
        and while requests are in flight. Raises RunError, and never serves again, when the load itself fails.
        """
        server, current = self._running()
        if version <= current:
            raise RunError(f"the engine has policy version {current}; it does not go back to {version}")
        if self._num_in_flight:
            raise RunError(f"{self._num_in_flight} batch(es) in flight; load policy version {version} after them")
        self._check_complete(version)
        self._policy_version = None
        try:
            async with asyncio.timeout(self._timeout_s):
                num_bytes = await self._verify(server, version, current)
                await server.load(self._store.folder, version)
        except TimeoutError:
            raise RunError(f"vLLM's workers did not load policy version {version} in {self._timeout_s:.0f} s") from None
        except RunError:
            raise
        except Exception as error:  # a failure inside vLLM's processes arrives as a bare Exception
            raise RunError(f"policy version {version} was not loaded, the engine stops serving: {error}") from error
        self._policy_version = version
        return num_bytes

    async def _verify(self, server: VllmServer, version: int, current: int) -> int:
        try:
            return await server.verify(self._store.folder, version)
        except Exception as error:
            self._policy_version = current  # no worker has touched its weights
            raise RunError(f"policy version {version} was not loaded, {current} serves on: {error}") from error

    async def shutdown(self) -> None:
        """End vLLM's processes."""
        self._policy_version = None
        if self._server is not None:
            self._server.shutdown()

    def _running(self) -> tuple[VllmServer, int]:
        if self._server is None or self._policy_version is None:
            raise RunError(
                "the engine has no known weights: it is not started, is loading, or a load failed; start it anew"
            )
        return self._server, self._policy_version

    @asynccontextmanager
    async def _serving(self, what: str) -> AsyncIterator[tuple[VllmServer, int]]:
        server, version = self._running()
        self._num_in_flight += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                yield server, version
        except TimeoutError:
            raise RunError(f"vLLM did not answer {what} in rollout.request_timeout_s={self._timeout_s:.0f}") from None
        finally:
            self._num_in_flight -= 1

    def _check_complete(self, version: int) -> None:
        # vLLM only warns about weights that did not come, and keeps the old ones.
        found = self._store.plan(version).shapes
        for name in sorted(found.keys() ^ self._expected_shapes.keys()):
            raise RunError(f"policy version {version} {'has unknown' if name in found else 'lacks'} tensor {name}")
        for name, shape in self._expected_shapes.items():
            if found[name] != shape:
                raise RunError(f"policy version {version} has {name} as {found[name]}, the model as {shape}")


def _checkpoint_shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a complete set of weights has: those of the checkpoint's safetensors files."""
    shapes = {}
    for path in sorted(model_path.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes.update((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
    if json.loads((model_path / "config.json").read_text()).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)  # some checkpoints repeat the embedding
    return shapes
