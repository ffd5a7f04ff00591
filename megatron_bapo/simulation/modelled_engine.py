"""Simulated engine: continuous batching on a virtual clock with the timing of a real engine and no computation."""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np

from megatron_bapo.rollout.messages import Completion, Generated, GenerationRequest
from megatron_bapo.simulation.cpu_contention import BusyCores, SharedCores

Policy = Callable[[GenerationRequest, int, int], Completion]
"""Maps (request, index of the completion, policy version) to the full response, of up to `max_tokens` tokens."""
PROMPT_TOKEN = -1
"""Token of all simulated prompts. A request whose last token is another one continues a response."""
WATERMARK = 0.99
"""Fraction of the KV cache that new sequences may fill, as in vLLM."""


class StepCost(Protocol):
    """Cost of decoding steps: an estimate (`DecodeCost`) or a measurement (`MeasuredDecode`)."""

    def seconds(self, num_steps: int, num_sequences: float, num_tokens: float) -> float:
        """Return the seconds of `num_steps` steps.

        The first step reads a KV cache of `num_tokens` tokens; every step adds one token per sequence.
        """
        ...

    def coarse(self, grain: int) -> StepCost: ...


@dataclass(frozen=True)
class EngineModel:
    """Timing and capacity of one engine."""

    decode: StepCost
    prefill_s: float
    """Prefill seconds of one token, of a prompt or of a response that is continued."""
    sequence_s: float
    """Seconds to admit one more sequence, independent of its prompt length."""
    kv_tokens: int
    max_num_seqs: int
    load_s: float
    """Seconds of a weight update."""
    num_cores: float = 0.0
    """Cores, of those shared with the trainer, that the engine keeps busy during generation."""
    state_tokens: float = 0.0
    """Tokens whose room in the KV cache a running sequence needs beside its own tokens."""
    shares_prompts: bool = True
    """Whether the responses of a request share the KV cache of its prompt."""


def countdown(lengths: np.ndarray) -> Policy:
    """Return a policy whose response lengths are sampled uniformly from `lengths` by the request's seed.

    Tokens count down to the end, so that any engine that continues a response knows how long it becomes.
    """

    def respond(request: GenerationRequest, position: int, version: int) -> Completion:
        left = int(request.context[-1][-1])
        if left == PROMPT_TOKEN:
            left = int(np.random.default_rng(request.seed + position).choice(lengths))
        num = min(left, request.max_tokens)
        tokens = np.arange(left - 1, left - 1 - num, -1, dtype=np.int32)
        return Completion(tokens, np.zeros(num, np.float32), "stop" if num == left else "length", "")

    return respond


@dataclass
class _Call:
    request: GenerationRequest
    result: asyncio.Future[Generated]
    sequences: list[_Sequence] = field(default_factory=list)


@dataclass(eq=False)
class _Sequence:
    end: int
    """Engine step after which the sequence is finished; set while it runs."""
    arrival: int
    call: _Call
    num_context: int
    """Prompt tokens that it adds to the KV cache: 0 for one that shares those of the request's first sequence."""
    full: Completion
    """The full response, which it reaches unless it is aborted."""
    num_done: int = 0
    """Response tokens generated when it last stopped running or reported progress."""
    num_reported: int = 0
    is_over: bool = False

    @property
    def completion(self) -> Completion:
        """The tokens generated so far; the finish reason is `abort` unless the response is complete."""
        full, num = self.full, self.num_done
        if num == len(full.token_ids):
            return full
        return Completion(full.token_ids[:num], full.log_probs[:num], "abort", "")

    def delta(self) -> Completion:
        """Return the tokens that have not been reported yet, without text."""
        so_far, start, self.num_reported = self.completion, self.num_reported, self.num_done
        return Completion(so_far.token_ids[start:], so_far.log_probs[start:], so_far.finish_reason, "", start)


class ModelledEngine:
    """Simulated engine that runs as many sequences as fit; each step adds one token to all of them."""

    def __init__(self, name: str, model: EngineModel, policy: Policy, cores: SharedCores | None = None) -> None:
        self.name = name
        self.version = 0
        """Policy version of its weights."""
        self._model = model
        self._policy = policy
        self._cores = cores or SharedCores(math.inf)
        self._step = 0
        self._kv_tokens = 0
        """Tokens in the KV cache."""
        self._running: list[tuple[int, int, _Sequence]] = []
        """Heap ordered by end and arrival."""
        self._waiting: deque[_Sequence] = deque()
        self._arrivals = count()
        self._calls: dict[str, _Call] = {}
        self._interrupted = asyncio.Event()
        self._stepped = asyncio.Event()
        self._aborting = False
        self._decoding: asyncio.Task[None] | None = None
        self.busy_s = 0.0
        self.sequence_s = 0.0
        """Sum over the sequences of the seconds that each was running."""
        self.most_running = 0

    async def generate(self, request: GenerationRequest) -> Generated:
        call = _Call(request, asyncio.get_running_loop().create_future())
        for position in range(request.n):
            full = self._policy(request, position, self.version)
            num_context = 0 if position > 0 and self._model.shares_prompts else request.num_prompt_tokens
            call.sequences.append(_Sequence(0, next(self._arrivals), call, num_context, full))
        self._calls[request.request_id] = call
        self._waiting.extend(call.sequences)
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.get_running_loop().create_task(self._decode_all(), name=self.name)
        elif self._fits(self._waiting[0]):
            self._interrupted.set()
        try:
            return await call.result
        except asyncio.CancelledError:
            self._cancel(call)
            raise
        finally:
            del self._calls[request.request_id]
            call.sequences.clear()  # they refer to the call: a cycle would be garbage until it is searched for

    async def abort(self) -> None:
        self._aborting = bool(self._running or self._waiting)
        self._interrupted.set()

    async def load_weights(self, version: int) -> None:
        assert not self._running, "weights cannot be updated while requests are in flight"
        await asyncio.sleep(self._model.load_s)
        self.version = version

    async def progress(self) -> dict[str, Generated]:
        if self._running:
            self._interrupted.set()
            await self._stepped.wait()
        for *_, sequence in self._running:
            sequence.num_done = self._num_done(sequence)
        return {
            name: Generated(self.version, tuple(sequence.delta() for sequence in call.sequences))
            for name, call in self._calls.items()
        }

    def _fits(self, sequence: _Sequence) -> bool:
        tokens = sequence.num_context + sequence.num_done + (len(self._running) + 1) * self._model.state_tokens
        is_room = (
            self._kv_tokens + tokens <= WATERMARK * self._model.kv_tokens
            and len(self._running) < self._model.max_num_seqs
        )
        return is_room or not self._running

    async def _decode_all(self) -> None:
        with self._cores.busy(self._model.num_cores) as cores:
            await self._decode_until_idle(cores)

    async def _decode_until_idle(self, cores: BusyCores) -> None:
        loop = asyncio.get_running_loop()
        while self._running or self._waiting:
            start, admission_s = loop.time(), self._admit()
            planned = self._steps_to_next_event()
            num, tokens = len(self._running), self._kv_tokens

            def seconds(steps: int, num: int = num, tokens: int = tokens, admission_s: float = admission_s) -> float:
                return admission_s + self._model.decode.seconds(steps, num, tokens)

            self._interrupted.clear()
            done_s, steps = await cores.work_until(self._interrupted, seconds(planned)), planned
            if done_s < seconds(planned):
                # Finish the current step first.
                steps = min(planned, bisect_left(range(1, planned + 1), done_s, key=seconds) + 1)
                await cores.work(seconds(steps) - done_s)
            self._advance(steps)
            self.busy_s += loop.time() - start
            self.sequence_s += num * (loop.time() - start)
            self._finish_sequences()

    def _admit(self) -> float:
        """Start the waiting sequences that fit, in order of arrival; return the seconds of admission and prefill."""
        num_tokens = num_admitted = 0
        while self._waiting and self._fits(self._waiting[0]):
            sequence = self._waiting.popleft()
            tokens = sequence.num_context + sequence.num_done
            self._kv_tokens += tokens
            num_tokens += tokens
            num_admitted += 1
            sequence.end = self._step + len(sequence.full.token_ids) - sequence.num_done
            heapq.heappush(self._running, (sequence.end, sequence.arrival, sequence))
        self.most_running = max(self.most_running, len(self._running))
        return num_tokens * self._model.prefill_s + num_admitted * self._model.sequence_s

    def _steps_to_next_event(self) -> int:
        """Return the steps until a sequence is finished or the KV cache is full."""
        to_end = self._running[0][0] - self._step
        to_full = int((self._model.kv_tokens - self._kv_tokens) / len(self._running) - self._model.state_tokens)
        if to_full < 1 and len(self._running) > 1:
            self._preempt(max((sequence for *_, sequence in self._running), key=lambda sequence: sequence.arrival))
            return self._steps_to_next_event()
        return to_end if len(self._running) == 1 else min(to_end, to_full)

    def _preempt(self, sequence: _Sequence) -> None:
        """Evict a sequence as vLLM does: its KV cache is freed and recomputed later."""
        self._stop(sequence)
        self._waiting.appendleft(sequence)

    def _advance(self, steps: int) -> None:
        self._step += steps
        self._kv_tokens += steps * len(self._running)
        self._stepped.set()
        self._stepped = asyncio.Event()

    def _finish_sequences(self) -> None:
        """Complete finished sequences, or all sequences if the engine is aborting."""
        while self._running and (self._aborting or self._running[0][0] <= self._step):
            *_, sequence = heapq.heappop(self._running)
            self._free_cache(sequence)
            self._complete(sequence)
        while self._aborting and self._waiting:
            self._complete(self._waiting.popleft())
        self._aborting = False

    def _stop(self, sequence: _Sequence) -> None:
        self._running.remove((sequence.end, sequence.arrival, sequence))
        heapq.heapify(self._running)
        self._free_cache(sequence)

    def _free_cache(self, sequence: _Sequence) -> None:
        sequence.num_done = self._num_done(sequence)
        self._kv_tokens -= sequence.num_context + sequence.num_done

    def _num_done(self, sequence: _Sequence) -> int:
        """Return the response tokens of a running sequence."""
        return len(sequence.full.token_ids) - (sequence.end - self._step)

    def _complete(self, sequence: _Sequence) -> None:
        sequence.is_over, call = True, sequence.call
        if all(each.is_over for each in call.sequences) and not call.result.done():
            completions = tuple(each.completion for each in call.sequences)
            call.result.set_result(Generated(self.version, completions))

    def _cancel(self, call: _Call) -> None:
        """Drop the sequences of a cancelled call."""
        for sequence in [sequence for *_, sequence in self._running if sequence.call is call]:
            self._stop(sequence)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.call is not call)
        self._interrupted.set()
