"""An engine that takes the time of a real one and computes nothing: continuous batching on a virtual clock."""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

import numpy as np

from megatron_bapo.rollout.messages import Completion, Generated, GenerationRequest
from megatron_bapo.rollout.shared_cores import BusyCores, SharedCores

Policy = Callable[[GenerationRequest, int, int], Completion]
"""The whole answer to a request, of its completion at a position, by a policy version: up to `max_tokens`."""
PROMPT_TOKEN = -1
"""What prompts consist of where answers count down; a request whose last token is another one continues an answer."""
WATERMARK = 0.99
"""Part of the cache that new sequences may fill, as in vLLM."""


class StepCost(Protocol):
    """An estimate (`DecodeCost`), or what was measured (`MeasuredDecode`)."""

    def seconds(self, num_steps: int, num_sequences: float, num_tokens: float) -> float:
        """Of `num_steps` steps, the first of which meets `num_tokens` keys and values; each adds one per sequence."""
        ...

    def coarse(self, grain: int) -> StepCost: ...


@dataclass(frozen=True)
class EngineModel:
    """What one engine can do."""

    decode: StepCost
    prefill_s: float
    """Of one token of a prompt, or of an answer that is continued."""
    sequence_s: float
    """Of taking in one more answer, however long its prompt is."""
    kv_tokens: int
    max_num_seqs: int
    load_s: float
    """In which new weights arrive."""
    num_cores: float = 0.0
    """That it keeps busy while it generates, of those that it shares with the trainer."""


def countdown(lengths: np.ndarray) -> Policy:
    """Answers of these lengths, each as likely as any other; a request's seed picks one.

    Tokens count down to the end, so that whichever engine goes on with an answer knows how long it becomes.
    """

    def answer(request: GenerationRequest, position: int, version: int) -> Completion:
        left = int(request.prompt_token_ids[-1])
        if left == PROMPT_TOKEN:
            left = int(np.random.default_rng(request.seed + position).choice(lengths))
        num = min(left, request.max_tokens)
        tokens = np.arange(left - 1, left - 1 - num, -1, dtype=np.int32)
        return Completion(tokens, np.zeros(num, np.float32), "stop" if num == left else "length", "")

    return answer


@dataclass
class _Call:
    request: GenerationRequest
    answered: asyncio.Future[Generated]
    sequences: list[_Sequence] = field(default_factory=list)


@dataclass(eq=False)
class _Sequence:
    end: int
    """The engine's step after which it is finished; set while it runs."""
    arrival: int
    call: _Call
    num_context: int
    """Tokens of the prompt, for the first of its answers: they share its keys and values."""
    whole: Completion
    """What it becomes unless it is aborted."""
    num_done: int = 0
    """As of when it ran last."""
    num_told: int = 0
    is_over: bool = False

    @property
    def completion(self) -> Completion:
        """What it has, given as aborted while there is more to come."""
        whole, num = self.whole, self.num_done
        if num == len(whole.token_ids):
            return whole
        return Completion(whole.token_ids[:num], whole.log_probs[:num], "abort", "")

    def news(self) -> Completion:
        """What has not been told yet, without a text."""
        known, start, self.num_told = self.completion, self.num_told, self.num_done
        return replace(known, token_ids=known.token_ids[start:], log_probs=known.log_probs[start:], text="")


class ModelledEngine:
    """Runs as many sequences as fit; all of them grow by one token in each step."""

    def __init__(self, name: str, model: EngineModel, policy: Policy, cores: SharedCores | None = None) -> None:
        self.name = name
        self.version = 0
        """Of the policy that it has."""
        self._model = model
        self._policy = policy
        self._cores = cores or SharedCores(math.inf)
        self._step = 0
        self._held = 0
        """Tokens whose keys and values it has."""
        self._running: list[tuple[int, int, _Sequence]] = []
        """A heap, by end and arrival."""
        self._waiting: deque[_Sequence] = deque()
        self._arrivals = count()
        self._calls: dict[str, _Call] = {}
        self._disturbed = asyncio.Event()
        self._stepped = asyncio.Event()
        self._aborting = False
        self._work: asyncio.Task[None] | None = None
        self.busy_s = 0.0
        self.sequence_s = 0.0
        """Seconds that it spent on sequences, added up over these."""
        self.most_running = 0

    async def generate(self, request: GenerationRequest) -> Generated:
        call = _Call(request, asyncio.get_running_loop().create_future())
        for position in range(request.n):
            whole = self._policy(request, position, self.version)
            num_context = len(request.prompt_token_ids) if position == 0 else 0
            call.sequences.append(_Sequence(0, next(self._arrivals), call, num_context, whole))
        self._calls[request.request_id] = call
        self._waiting.extend(call.sequences)
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._decode_all(), name=self.name)
        elif self._fits(self._waiting[0]):
            self._disturbed.set()
        try:
            return await call.answered
        except asyncio.CancelledError:
            self._forget(call)
            raise
        finally:
            del self._calls[request.request_id]

    async def abort(self) -> None:
        self._aborting = bool(self._running or self._waiting)
        self._disturbed.set()

    async def load_weights(self, version: int) -> None:
        assert not self._running, "weights are not exchanged under requests in flight"
        await asyncio.sleep(self._model.load_s)
        self.version = version

    async def progress(self) -> dict[str, Generated]:
        if self._running:
            self._disturbed.set()
            await self._stepped.wait()
        for *_, sequence in self._running:
            sequence.num_done = self._num_done(sequence)
        return {
            name: Generated(self.version, tuple(sequence.news() for sequence in call.sequences))
            for name, call in self._calls.items()
        }

    def _fits(self, sequence: _Sequence) -> bool:
        tokens = sequence.num_context + sequence.num_done
        is_room = (
            self._held + tokens <= WATERMARK * self._model.kv_tokens and len(self._running) < self._model.max_num_seqs
        )
        return is_room or not self._running

    async def _decode_all(self) -> None:
        with self._cores.busy(self._model.num_cores) as cores:
            await self._decode_what_is_there(cores)

    async def _decode_what_is_there(self, cores: BusyCores) -> None:
        loop = asyncio.get_running_loop()
        while self._running or self._waiting:
            start, reading_s = loop.time(), self._admit()
            planned = self._steps_to_next_event()
            num, tokens = len(self._running), self._held

            def seconds(steps: int, num: int = num, tokens: int = tokens, reading_s: float = reading_s) -> float:
                return reading_s + self._model.decode.seconds(steps, num, tokens)

            self._disturbed.clear()
            done_s, steps = await cores.work_until(self._disturbed, seconds(planned)), planned
            if done_s < seconds(planned):
                # The step that is under way is finished first.
                steps = min(planned, bisect_left(range(1, planned + 1), done_s, key=seconds) + 1)
                await cores.work(seconds(steps) - done_s)
            self._advance(steps)
            self.busy_s += loop.time() - start
            self.sequence_s += num * (loop.time() - start)
            self._let_go()

    def _admit(self) -> float:
        """Start what fits, in order of arrival; the seconds of taking it in and reading its prompts."""
        num_read = num_taken = 0
        while self._waiting and self._fits(self._waiting[0]):
            sequence = self._waiting.popleft()
            tokens = sequence.num_context + sequence.num_done
            self._held += tokens
            num_read += tokens
            num_taken += 1
            sequence.end = self._step + len(sequence.whole.token_ids) - sequence.num_done
            heapq.heappush(self._running, (sequence.end, sequence.arrival, sequence))
        self.most_running = max(self.most_running, len(self._running))
        return num_read * self._model.prefill_s + num_taken * self._model.sequence_s

    def _steps_to_next_event(self) -> int:
        """Until a sequence is finished, or there is no room for another step."""
        to_end = self._running[0][0] - self._step
        to_full = (self._model.kv_tokens - self._held) // len(self._running)
        if to_full < 1 and len(self._running) > 1:
            self._preempt(max((sequence for *_, sequence in self._running), key=lambda sequence: sequence.arrival))
            return self._steps_to_next_event()
        return to_end if len(self._running) == 1 else min(to_end, to_full)

    def _preempt(self, sequence: _Sequence) -> None:
        """As vLLM does: its keys and values are given up and computed again later."""
        self._stop(sequence)
        self._waiting.appendleft(sequence)

    def _advance(self, steps: int) -> None:
        self._step += steps
        self._held += steps * len(self._running)
        self._stepped.set()
        self._stepped = asyncio.Event()

    def _let_go(self) -> None:
        """Answer with what is finished, and with everything when that was asked for."""
        while self._running and (self._aborting or self._running[0][0] <= self._step):
            *_, sequence = heapq.heappop(self._running)
            self._leave(sequence)
            self._complete(sequence)
        while self._aborting and self._waiting:
            self._complete(self._waiting.popleft())
        self._aborting = False

    def _stop(self, sequence: _Sequence) -> None:
        self._running.remove((sequence.end, sequence.arrival, sequence))
        heapq.heapify(self._running)
        self._leave(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        sequence.num_done = self._num_done(sequence)
        self._held -= sequence.num_context + sequence.num_done

    def _num_done(self, sequence: _Sequence) -> int:
        """Tokens of one that runs."""
        return len(sequence.whole.token_ids) - (sequence.end - self._step)

    def _complete(self, sequence: _Sequence) -> None:
        sequence.is_over, call = True, sequence.call
        if all(each.is_over for each in call.sequences) and not call.answered.done():
            completions = tuple(each.completion for each in call.sequences)
            call.answered.set_result(Generated(self.version, completions))

    def _forget(self, call: _Call) -> None:
        """Nobody waits for this one any more."""
        for sequence in [sequence for *_, sequence in self._running if sequence.call is call]:
            self._stop(sequence)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.call is not call)
        self._disturbed.set()
