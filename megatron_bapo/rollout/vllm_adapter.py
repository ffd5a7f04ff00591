"""Adapter of vLLM's asynchronous engine (`AsyncLLM`). Supports vLLM 0.32 on GPUs and CPUs.

Only the engine's own process imports this file, because importing vLLM takes seconds and hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from megatron_bapo.environment_variable import environment_variable
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.rollout.engine_adapters import adapter_request
from megatron_bapo.rollout.engine_args import engine_args
from megatron_bapo.rollout.engine_kept_tokens import KeptTokenReader
from megatron_bapo.rollout.engine_routes import RouteFormat
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.messages import Completion, EngineLost, GenerationRequest, SegmentEnd
from megatron_bapo.rollout.partial_output import PartialCompletion
from megatron_bapo.rollout.route_recorder import RECORD
from megatron_bapo.rollout.tokenization import text_of
from megatron_bapo.weight_sync.route import TransferGroup, WeightRoute

STREAM_INTERVAL = 32
"""Tokens that vLLM returns at a time. A lost engine loses at most as many, and those since its last probe."""
LIVENESS_S = 0.2
"""Seconds between two checks of vLLM's core while a call to it waits."""
T = TypeVar("T")


class VllmServer:
    """Owns vLLM's engine and its processes."""

    def __init__(self, spec: EngineSpec, scratch: Path, endpoint: str = "") -> None:
        """Load the checkpoint; `scratch` is a folder for vLLM's temporary files.

        `endpoint` is HOST:PORT of the store where the ranks of an engine on several nodes meet. Raises UserError for
        settings that vLLM refuses, RunError if its processes do not start.
        """
        args = engine_args(spec, endpoint=endpoint)
        with _starting(spec.model_path, scratch):
            self._llm = AsyncLLM.from_engine_args(args)
        self._tokenizer = self._llm.get_tokenizer()
        self._adapters = spec.adapters
        self._served: LoRARequest | None = None
        """The adapter that requests name: none before the first policy version, which is the checkpoint."""
        self._in_flight: dict[str, list[_SampledCompletion]] = {}
        self._routes = RouteFormat.of(spec.model_path) if spec.return_routes else None
        self._vocab_size = self._llm.model_config.get_vocab_size()
        kept = KeptTokenReader(self._vocab_size, by_log_probs=current_platform.is_cpu())
        self._kept = kept if spec.return_kept_tokens else None
        self._records_routes = spec.return_routes and current_platform.is_cpu()
        """Whether the workers record routes, because vLLM does not return them."""
        # Imports leave half a million objects that live as long as the process; collecting them takes 0.3 s each time.
        gc.collect()
        gc.freeze()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[tuple[Completion, ...]]:
        """Return the completions of each request, in order. Raises EngineLost or RunError if vLLM fails."""
        with self._failures("while generating"):
            outputs = await asyncio.gather(*map(self._sample, requests))
        return [
            tuple(self._finished(request, partial) for partial in output)
            for request, output in zip(requests, outputs, strict=True)
        ]

    def _finished(self, request: GenerationRequest, partial: _SampledCompletion) -> Completion:
        completion = replace(partial.completion(), context_log_probs=partial.context_log_probs)
        if self._routes is not None:
            num_tokens = request.num_prompt_tokens + len(completion.token_ids) - 1 - request.num_routed
            completion = self._routes.attached(completion, partial.experts, num_tokens)
        if not partial.has_ended:
            return completion  # other tokens follow in another request
        return replace(completion, text=text_of(completion.token_ids, self._tokenizer))  # pyright: ignore[reportArgumentType]

    def progress(self) -> dict[str, tuple[Completion, ...]]:
        """Return, by request in flight, the tokens of its completions since the last call, without texts."""
        return {name: tuple(partial.delta() for partial in partials) for name, partials in self._in_flight.items()}

    async def _sample(self, request: GenerationRequest) -> list[_SampledCompletion]:
        # logprobs=0 returns the log-prob of the sampled token only. Text is decoded once per response, not per token.
        # Seeds cost nothing on GPUs: there vLLM samples all rows in one kernel (v1/worker/gpu/sample/gumbel.py).
        num_log_probs = 0 if self._kept is None else self._kept.num_log_probs(request.top_k)
        recorded: dict[str, Any] = {}
        if self._routes is not None:
            recorded = {"routed_experts_prompt_start": request.num_routed, "extra_args": {RECORD: True}}
        if request.scores_context:
            recorded |= {"prompt_logprobs": 0}
        params = SamplingParams(
            n=request.n, temperature=request.temperature, top_p=request.top_p, top_k=request.top_k,
            min_p=request.min_p, max_tokens=request.max_tokens, seed=request.seed, logprobs=num_log_probs,
            flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.DELTA, stream_interval=STREAM_INTERVAL,
            **recorded,
        )  # fmt: skip
        # vLLM returns only distinct completions: a single one at temperature 0.
        partials = self._in_flight[request.request_id] = [_SampledCompletion() for _ in range(request.n)]
        try:
            prompt = tokens_input(request.prompt_token_ids.tolist())
            async for output in self._llm.generate(prompt, params, request.request_id, lora_request=self._served):
                for completion in output.outputs:
                    kept = None if self._kept is None else self._kept.of(completion)
                    partials[completion.index].append(completion, kept)
                if isinstance(output.prompt_logprobs, FlatLogprobs):  # vLLM returns them once
                    partials[0].context_log_probs = np.asarray(output.prompt_logprobs.logprobs, np.float32)
        finally:
            del self._in_flight[request.request_id]
        if self._records_routes:
            await self._take_recorded(request, partials)
        return [partial for partial in partials if partial.is_sampled]

    async def _take_recorded(self, request: GenerationRequest, partials: Sequence[_SampledCompletion]) -> None:
        """Give the completions the experts that the workers have recorded, which are the same in all of them."""
        taking = self._llm.collective_rpc("take_routes", args=(request.request_id,))
        found, *_ = await self._call("while it returned routes", taking)
        for index, shape, content in found:
            partials[index].experts = np.frombuffer(content, np.int16).reshape(shape)[request.num_routed :]

    async def decode(self, token_ids: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample `num` tokens after a sequence at temperature 1; return them and their log-probs; raises as `generate`.

        The samples are the same in each call under the same weights.
        """
        params = SamplingParams(
            max_tokens=num, temperature=1.0, seed=0, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY, top_k=self._vocab_size,  # vLLM may need one to return kept tokens
        )  # fmt: skip
        with self._failures("while decoding"):
            (completion,) = (await self._final_output(token_ids, params, "decode")).outputs
        assert isinstance(completion.logprobs, FlatLogprobs)
        return np.asarray(completion.token_ids, np.int32), np.asarray(completion.logprobs.logprobs, np.float32)

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 [S - 1] log-probs of each token but the first at temperature 1; raises as `generate`."""
        # A request must generate at least one token; prompt_logprobs=0 returns the prompt's own tokens only.
        params = SamplingParams(
            max_tokens=1, temperature=1.0, top_k=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        with self._failures("while scoring"):
            output = await self._final_output(token_ids, params, "score")
        assert isinstance(output.prompt_logprobs, FlatLogprobs)
        return np.asarray(output.prompt_logprobs.logprobs, np.float32)

    async def _final_output(self, token_ids: np.ndarray, params: SamplingParams, request_id: str) -> RequestOutput:
        prompt = tokens_input(token_ids.tolist())
        outputs = self._llm.generate(prompt, params, request_id, lora_request=self._served)
        return [output async for output in outputs][-1]

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens of requests of `max_model_len` that the cache holds: layers of several kinds share its blocks."""
        num_tokens = self._llm.vllm_config.cache_config.kv_cache_size_tokens
        assert num_tokens, "vLLM sets the size of its cache when it starts"
        return num_tokens

    async def abort(self) -> None:
        """Abort every request in flight, those that arrive meanwhile included; each returns the tokens so far."""
        await self._pause()
        # vLLM queues the requests that it receives while paused, and would serve them to their end when it resumes.
        while self._in_flight:
            await self._pause()
        await self._call("while it resumed", self._llm.resume_generation())

    async def _pause(self) -> None:
        await self._call("while it aborted", self._llm.pause_generation(mode="abort", clear_cache=False))

    async def check_health(self) -> None:
        """Return when the engine core responds; raises EngineLost if it has ended."""
        await self._call("while it was probed", self._llm.is_paused())

    async def connect(self, route: WeightRoute) -> None:
        """Set the workers' weight route; must be called before the first request."""
        request = WeightTransferInitRequest({"route": route.to_json()})
        await self._call("while it got its weight route", self._llm.init_weight_transfer_engine(request))
        if self._records_routes:
            await self._call("while it began to record routes", self._llm.collective_rpc("record_routes"))

    async def divide_logits(self, divisor: float) -> None:
        """Divide all logits by `divisor`; must be called before the first request, once."""
        dividing = self._llm.collective_rpc("divide_logits", args=(divisor,))
        await self._call("while it got its scoring temperature", dividing)

    async def verify(self, version: int, group: TransferGroup | None) -> int:
        """Check a version before it is loaded, and join the group that transfers it, if any.

        Returns the bytes that all workers will read. Raises RunError with a worker's error message, EngineLost if vLLM
        fails.
        """
        args = version, None if group is None else group.to_json()
        results = await self._call("while verifying", self._llm.collective_rpc("verify_policy", args=args))
        if problems := [result for result in results if isinstance(result, str)]:
            raise RunError(problems[0])
        return sum(results)

    async def load(self, version: int) -> None:
        """Load a version's weights and clear the KV cache of the old weights; raises EngineLost if vLLM fails."""
        when, update = "while loading", WeightTransferUpdateRequest({"version": version})
        if self._adapters is not None:
            await self._call(when, self._llm.collective_rpc("load_adapters", args=(version, self._adapters.scale)))
            self._served = adapter_request()
        else:
            await self._call(when, self._llm.start_weight_update())
            await self._call(when, self._llm.update_weights(update))
            await self._call(when, self._llm.finish_weight_update(str(version)))
        # Otherwise the prefix cache would reuse the old weights' KV cache for repeated prompts.
        if not await self._call(when, self._llm.reset_prefix_cache()):
            raise EngineLost("vLLM did not clear its prefix cache")

    async def sleep(self, level: Literal[1, 2]) -> None:
        """Free the GPU memory of the weights and the KV cache; level 1 keeps the weights in host memory.

        Raises EngineLost if vLLM fails.
        """
        await self._call("while it freed its memory", self._llm.sleep(level))

    async def wake(self, tags: Sequence[str]) -> None:
        """Allocate memory for `weights` or `kv_cache` again; vLLM can serve when it has both; raises as `sleep`."""
        await self._call("while it woke up", self._llm.wake_up(list(tags)))

    def shutdown(self) -> None:
        """End vLLM's processes."""
        self._llm.shutdown()

    async def _call(self, when: str, work: Coroutine[Any, Any, T]) -> T:
        """Await a call that vLLM's core replies to; raises EngineLost if the core ends or the call fails.

        vLLM 0.32.0 lets a call wait forever if the core ends before it replies: nothing completes the futures of
        `_call_utility_async` in vllm/v1/engine/core_client.py.
        """
        call = asyncio.ensure_future(work)
        try:
            with self._failures(when):
                while not call.done():
                    await self._llm.check_health()
                    await asyncio.wait({call}, timeout=LIVENESS_S)
                return call.result()
        except EngineLost:
            raise
        except Exception as error:  # vLLM raises a plain Exception for failures inside its processes
            raise EngineLost(f"vLLM failed {when}: {error}") from error
        finally:
            call.cancel()

    @contextmanager
    def _failures(self, when: str) -> Iterator[None]:
        """Raise EngineLost if vLLM's core has ended, RunError for a failure that the request itself may have caused."""
        try:
            yield
        except (EngineDeadError, EngineGenerateError) as error:
            if isinstance(error, EngineDeadError) or self._llm.errored:
                raise EngineLost(f"vLLM's core ended {when}: {error!r}; its output says why") from error
            raise RunError(f"vLLM failed {when}: {error!r}; its output says why") from error


class VllmFollower:
    """Owns vLLM's processes on a further node of an engine that has its core on another node."""

    def __init__(self, spec: EngineSpec, scratch: Path, node: int, endpoint: str) -> None:
        """Start the ranks of node `node`; returns when the ranks of all nodes have loaded the checkpoint.

        The arguments and errors are those of `VllmServer`.
        """
        args = engine_args(spec, node, endpoint)
        with _starting(spec.model_path, scratch):
            config = args.create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
            self._executor = MultiprocExecutor(config)

    @property
    def has_failed(self) -> bool:
        """Whether a rank on this node has ended."""
        return self._executor.is_failed


@contextmanager
def _starting(model_path: Path, scratch: Path) -> Iterator[None]:
    """Raise UserError for settings that vLLM refuses, RunError if its processes do not start."""
    try:
        with _temporary_files_in(scratch):
            yield
    except ValueError as error:
        raise UserError(f"vLLM refuses {model_path} with these rollout settings: {error}") from error
    except Exception as error:  # vLLM raises a plain Exception for failures inside its processes
        raise RunError(f"vLLM did not start with {model_path}: {error}; its output says why") from error


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Set the temporary folder of processes started in this context.

    vLLM leaves its rendezvous files behind, and its sockets if it is killed.
    """
    with environment_variable("TMPDIR", str(folder)):
        cached, tempfile.tempdir = tempfile.tempdir, str(folder)
        try:
            yield
        finally:
            tempfile.tempdir = cached


class _SampledCompletion(PartialCompletion):
    """A completion that vLLM is generating."""

    def __init__(self) -> None:
        super().__init__()
        self.is_sampled = False
        """False until vLLM returns a part of it, and for good if it equals another completion."""
        self.context_log_probs: np.ndarray | None = None
        self.experts: np.ndarray | None = None
        """Experts [N, layers, K] of the tokens from `num_routed` of the request on, once vLLM has ended it."""
        self._reported = 0, 0
        """Numbers of tokens and kept tokens that `delta` has returned."""

    def append(self, output: CompletionOutput, kept_tokens: np.ndarray | None) -> None:
        """Append what vLLM has returned, and the tokens that its tokens were sampled from."""
        self.is_sampled, end = True, _segment_end(output.finish_reason or "abort")
        if output.routed_experts is not None:
            self.experts = output.routed_experts
        if output.token_ids:
            assert isinstance(output.logprobs, FlatLogprobs)
            log_probs = [output.logprobs.logprobs[start] for start in output.logprobs.start_indices]
            self.extend(output.token_ids, log_probs, end, kept_tokens)
        else:
            self.extend([], [], end)

    def delta(self) -> Completion:
        """Return the tokens since the last call."""
        starts, self._reported = self._reported, (self.num, self.num_kept)
        return self.completion(*starts)


def _segment_end(finish_reason: str) -> SegmentEnd:
    if finish_reason not in ("stop", "length", "abort"):
        raise RunError(f"vLLM ended a request with the unexpected finish reason {finish_reason!r}")
    return finish_reason
