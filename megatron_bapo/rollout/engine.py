"""One vLLM engine: samples, scores, and takes over new weights between batches.

The controller places it as an actor; here it is plain asyncio. While weights load, and after a load that failed, it
serves nothing: no answer is ever of unknown weights.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from vllm import AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from megatron_bapo.config.schema import RolloutConfig
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.records import FinishReason
from megatron_bapo.weight_sync.transport import WeightStore

INITIAL_VERSION = 0
"""The policy version of the checkpoint that an engine starts from."""


@dataclass(frozen=True)
class GenerationRequest:
    request_id: str
    prompt_token_ids: np.ndarray
    """int32 [P]"""
    n: int
    """Number of completions."""
    temperature: float
    max_tokens: int
    """Per completion, the end-of-sequence token included."""
    seed: int
    """Of the first completion; the i-th samples with seed + i."""


@dataclass(frozen=True)
class Completion:
    token_ids: np.ndarray
    """int32 [R], with the end-of-sequence token when `finish_reason` is `stop`."""
    log_probs: np.ndarray
    """float32 [R], of each sampled token at the sampling temperature, in nats."""
    finish_reason: FinishReason
    text: str
    """Special tokens left out."""


@dataclass(frozen=True)
class Generated:
    policy_version: int
    completions: tuple[Completion, ...]


@dataclass(frozen=True)
class SequenceScore:
    policy_version: int
    log_probs: np.ndarray
    """float32 [S - 1], of each token but the first given those before it, at temperature 1, in nats."""


def engine_environment(has_gpu: bool) -> dict[str, str]:
    """Environment variables that the engine's process must be started with."""
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
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


class Engine:
    """Owns one vLLM engine and knows which weights it has."""

    def __init__(self, log_file: Path | None = None) -> None:
        """`log_file` receives everything that this process and vLLM's own print; without it they print here."""
        if log_file is not None:
            _print_to(log_file)
        self._llm: AsyncLLM | None = None
        self._policy_version: int | None = None
        self._num_in_flight = 0

    async def start(
        self, model_path: Path, settings: RolloutConfig, dtype: str, max_model_len: int, seed: int, store_folder: Path
    ) -> None:
        """Load the checkpoint and get ready to serve it as policy version 0.

        `max_model_len` counts prompt and response. Raises UserError for settings that vLLM refuses, RunError when its
        processes do not come up.
        """
        # vLLM leaves its sockets behind; in the store's folder they are private, and go with it.
        os.environ["VLLM_RPC_BASE_PATH"] = str(store_folder)
        try:
            self._llm = AsyncLLM.from_engine_args(_engine_args(model_path, settings, dtype, max_model_len, seed))
        except ValueError as error:
            raise UserError(f"vLLM refuses {model_path} with these rollout settings: {error}") from error
        except RuntimeError as error:
            raise RunError(f"vLLM did not start with {model_path}: {error}; its output says why") from error
        self._tokenizer = self._llm.get_tokenizer()
        self._timeout_s = settings.request_timeout_s
        self._store = WeightStore(store_folder)
        self._expected_shapes = _checkpoint_shapes(model_path, self._llm.model_config.hf_config.tie_word_embeddings)
        self._policy_version = INITIAL_VERSION
        # Half a million objects of imports that live as long as the process: walking them is a 0.3 s pause.
        gc.collect()
        gc.freeze()

    async def generate(self, request: GenerationRequest) -> Generated:
        """Sample `n` completions; the same request under the same weights gets the same answer."""
        return (await self.generate_many([request]))[0]

    async def generate_many(self, requests: Sequence[GenerationRequest]) -> list[Generated]:
        """Answer a batch of requests, in order.

        Raises RunError when there are no known weights to serve, vLLM fails, or `request_timeout_s` passes.
        """
        async with self._serving(f"{len(requests)} prompts from {requests[0].request_id} on") as (llm, version):
            outputs = await asyncio.gather(*(_sample(llm, request) for request in requests))
        completions = iter(_completions([answer for output in outputs for answer in output.outputs], self._tokenizer))
        return [Generated(version, tuple(next(completions) for _ in output.outputs)) for output in outputs]

    async def score(self, token_ids: np.ndarray) -> SequenceScore:
        """Log-probs of a given sequence [S], which must be shorter than `max_model_len`; errors as `generate_many`."""
        # A request has to generate; prompt_logprobs=0 asks for the prompt's own tokens and for no alternatives.
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        async with self._serving("a score request") as (llm, version):
            output = await _final_output(llm, token_ids, params, "score")
        assert isinstance(output.prompt_logprobs, FlatLogprobs)
        return SequenceScore(version, np.asarray(output.prompt_logprobs.logprobs, np.float32))

    async def load_weights(self, version: int) -> None:
        """Take over a committed version from the store.

        Raises RunError, and serves on, for a version that is not newer, not committed, or not of this model, and while
        requests are in flight. Raises RunError, and never serves again, when the load itself fails.
        """
        llm, current = self._running()
        if version <= current:
            raise RunError(f"the engine has policy version {current}; it does not go back to {version}")
        if self._num_in_flight:
            raise RunError(f"{self._num_in_flight} batch(es) in flight; load policy version {version} after them")
        self._check_complete(version)
        self._policy_version = None
        try:
            async with asyncio.timeout(self._timeout_s):
                await llm.collective_rpc("load_policy", args=(str(self._store.folder), version))
                # Keys and values of the old weights would answer for prompts that were seen before.
                if not await llm.reset_prefix_cache():
                    raise RunError("vLLM did not clear its prefix cache")
        except TimeoutError:
            raise RunError(f"vLLM's workers did not load policy version {version} in {self._timeout_s:.0f} s") from None
        except Exception as error:  # a failure inside vLLM's processes arrives as a bare Exception
            raise RunError(f"policy version {version} was not loaded, the engine stops serving: {error}") from error
        self._policy_version = version

    async def shutdown(self) -> None:
        """End vLLM's processes."""
        self._policy_version = None
        if self._llm is not None:
            self._llm.shutdown()

    def _running(self) -> tuple[AsyncLLM, int]:
        if self._llm is None or self._policy_version is None:
            raise RunError(
                "the engine has no known weights: it is not started, is loading, or a load failed; start it anew"
            )
        return self._llm, self._policy_version

    @asynccontextmanager
    async def _serving(self, what: str) -> AsyncIterator[tuple[AsyncLLM, int]]:
        llm, version = self._running()
        self._num_in_flight += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                yield llm, version
        except TimeoutError:
            raise RunError(f"vLLM did not answer {what} in rollout.request_timeout_s={self._timeout_s:.0f}") from None
        except (EngineDeadError, EngineGenerateError) as error:
            raise RunError(f"vLLM failed on {what}: {error!r}; its output says why") from error
        finally:
            self._num_in_flight -= 1

    def _check_complete(self, version: int) -> None:
        # vLLM only warns about weights that did not come, and keeps the old ones.
        found = {name: info.shape for name, info in self._store.manifest(version).tensors().items()}
        for name in sorted(found.keys() ^ self._expected_shapes.keys()):
            raise RunError(f"policy version {version} {'has unknown' if name in found else 'lacks'} tensor {name}")
        for name, shape in self._expected_shapes.items():
            if found[name] != shape:
                raise RunError(f"policy version {version} has {name} as {found[name]}, the model as {shape}")


def _engine_args(
    model_path: Path, settings: RolloutConfig, dtype: str, max_model_len: int, seed: int
) -> AsyncEngineArgs:
    options: dict[str, Any] = {}
    if current_platform.is_cpu():
        options = {
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 29,
            # A quarter of vLLM's own choice: a group shares its prompt's full blocks only.
            "block_size": 32,
            # vLLM 0.32.0 dies of "CPU Generator does not use offset" when it cuts the prompt of a request with a seed
            # (_bookkeeping_sync in vllm/v1/worker/gpu_model_runner.py). Remove once it rewinds CPU generators, too.
            "enable_chunked_prefill": False,
        }
    if settings.kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * 2**30)
    return AsyncEngineArgs(
        model=str(model_path),
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=max_model_len,
        seed=seed,
        tensor_parallel_size=settings.tensor_parallel_size,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_prefix_caching=True,
        # After the temperature: the log-probs of the distribution that was sampled from.
        logprobs_mode="processed_logprobs",
        worker_extension_cls="megatron_bapo.rollout.engine_worker.WeightLoader",
        trust_remote_code=False,
        disable_log_stats=True,
        **options,
    )


async def _sample(llm: AsyncLLM, request: GenerationRequest) -> RequestOutput:
    # logprobs=0 asks for the sampled token's alone. Text is decoded once per answer instead of once per token.
    params = SamplingParams(
        n=request.n, temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed,
        logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    return await _final_output(llm, request.prompt_token_ids, params, request.request_id)


async def _final_output(llm: AsyncLLM, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> RequestOutput:
    outputs = [output async for output in llm.generate(tokens_input(token_ids.tolist()), params, request_id)]
    return outputs[-1]


def _completions(answers: Sequence[CompletionOutput], tokenizer: TokenizerLike) -> list[Completion]:
    token_ids = [list(answer.token_ids) for answer in answers]
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)  # pyright: ignore[reportAttributeAccessIssue]
    completions = []
    for answer, ids, text in zip(answers, token_ids, texts, strict=True):
        assert isinstance(answer.logprobs, FlatLogprobs)
        assert len(answer.logprobs.logprobs) == len(ids), "one log-prob per sampled token"
        if answer.finish_reason not in ("stop", "length"):
            raise RunError(f"vLLM ended a request with {answer.finish_reason!r} instead of an answer")
        log_probs = np.asarray(answer.logprobs.logprobs, np.float32)
        completions.append(Completion(np.asarray(ids, np.int32), log_probs, answer.finish_reason, text))
    return completions


def _checkpoint_shapes(model_path: Path, tie_word_embeddings: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a complete set of weights has: those of the checkpoint's safetensors files."""
    shapes = {}
    for path in sorted(model_path.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes.update((name, tuple(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118
    if tie_word_embeddings:
        shapes.pop("lm_head.weight", None)  # some checkpoints repeat the embedding
    return shapes


def _print_to(log_file: Path) -> None:
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
