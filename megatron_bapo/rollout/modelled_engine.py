"""An engine that takes the time of a real one and computes nothing: continuous batching on a virtual clock.

An answer's tokens count down to its end, so that whichever engine goes on with it knows how long it becomes.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.rollout.messages import Completion, Generated, GenerationRequest, SegmentEnd
from megatron_bapo.rollout.shared_cores import SharedCores

PROMPT_TOKEN = -1
"""What prompts consist of; a request whose last token is another one continues an answer."""
WATERMARK = 0.99
"""Part of the cache that new sequences may fill, as in vLLM."""


@dataclass(frozen=True)
class EngineModel:
    """What one engine can do."""

    decode: DecodeCost
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


@dataclass
class _Call:
    request: GenerationRequest
    answered: asyncio.Future[Generated]
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(eq=False)
class _Sequence:
    end: int
    """The engine's step after which it is finished; set while it runs."""
    arrival: int
    call: _Call
    position: int
    left: int
    """Tokens up to the end of the answer, as the request found it."""
    num_new: int
    """Tokens to be generated for this request."""
    num_done: int = 0

    @property
    def num_context(self) -> int:
        """Answers to one prompt share its keys and values."""
        return len(self.call.request.prompt_token_ids) if self.position == 0 else 0


class ModelledEngine:
    """Runs as many sequences as fit; all of them grow by one token in each step."""

    def __init__(self, name: str, model: EngineModel, lengths: np.ndarray, cores: SharedCores | None = None) -> None:
        """`lengths`: answers' lengths, each as likely as any other; a request's seed picks one."""
        self.name = name
        self._model = model
        self._cores = cores or SharedCores(math.inf)
        self._lengths = lengths
        self._version = 0
        self._step = 0
        self._held = 0
        """Tokens whose keys and values it has."""
        self._running: list[tuple[int, int, _Sequence]] = []
        """A heap, by end and arrival."""
        self._waiting: deque[_Sequence] = deque()
        self._arrivals = count()
        self._disturbed = asyncio.Event()
        self._aborting = False
        self._work: asyncio.Task[None] | None = None
        self.busy_s = 0.0
        self.sequence_s = 0.0
        """Seconds that it spent on sequences, added up over these."""

    async def generate(self, request: GenerationRequest) -> Generated:
        call = _Call(request, asyncio.get_running_loop().create_future())
        for position in range(request.n):
            left = self._left(request, position)
            arrival = next(self._arrivals)
            self._waiting.append(_Sequence(0, arrival, call, position, left, min(left, request.max_tokens)))
        if self._work is None or self._work.done():
            self._work = asyncio.get_running_loop().create_task(self._decode_all(), name=self.name)
        elif self._fits(self._waiting[0]):
            self._disturbed.set()
        try:
            return await call.answered
        except asyncio.CancelledError:
            self._forget(call)
            raise

    async def abort(self) -> None:
        self._aborting = bool(self._running or self._waiting)
        self._disturbed.set()

    async def load_weights(self, version: int) -> None:
        assert not self._running, "weights are not exchanged under requests in flight"
        await asyncio.sleep(self._model.load_s)
        self._version = version

    async def progress(self) -> dict[str, Generated]:
        """It never dies."""
        return {}

    def _left(self, request: GenerationRequest, position: int) -> int:
        if (last := int(request.prompt_token_ids[-1])) != PROMPT_TOKEN:
            return last
        return int(np.random.default_rng(request.seed + position).choice(self._lengths))

    def _fits(self, sequence: _Sequence) -> bool:
        tokens = sequence.num_context + sequence.num_done
        is_room = (
            self._held + tokens <= WATERMARK * self._model.kv_tokens and len(self._running) < self._model.max_num_seqs
        )
        return is_room or not self._running

    async def _decode_all(self) -> None:
        with self._cores.busy(self._model.num_cores):
            await self._decode_what_is_there()

    async def _decode_what_is_there(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running or self._waiting:
            start, reading_s = loop.time(), self._admit()
            planned = self._steps_to_next_event()
            num, tokens = len(self._running), self._held

            def seconds(steps: int, num: int = num, tokens: int = tokens, reading_s: float = reading_s) -> float:
                return reading_s + self._model.decode.seconds(steps, num, tokens)

            self._disturbed.clear()
            done_s, steps = await self._cores.work_until(self._disturbed, seconds(planned)), planned
            if done_s < seconds(planned):
                # The step that is under way is finished first.
                steps = min(planned, bisect_left(range(1, planned + 1), done_s, key=seconds) + 1)
                await self._cores.work(seconds(steps) - done_s)
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
            sequence.end = self._step + sequence.num_new - sequence.num_done
            heapq.heappush(self._running, (sequence.end, sequence.arrival, sequence))
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
        sequence.num_done = sequence.num_new - (sequence.end - self._step)
        self._held -= sequence.num_context + sequence.num_done

    def _complete(self, sequence: _Sequence) -> None:
        call, num = sequence.call, sequence.num_done
        end: SegmentEnd = "stop" if num == sequence.left else "length" if num == sequence.num_new else "abort"
        tokens = np.arange(sequence.left - 1, sequence.left - 1 - num, -1, dtype=np.int32)
        call.completions[sequence.position] = Completion(tokens, np.zeros(num, np.float32), end, "")
        if len(call.completions) == call.request.n and not call.answered.done():
            completions = tuple(call.completions[position] for position in range(call.request.n))
            call.answered.set_result(Generated(self._version, completions))

    def _forget(self, call: _Call) -> None:
        """Nobody waits for this one any more."""
        for sequence in [sequence for *_, sequence in self._running if sequence.call is call]:
            self._stop(sequence)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.call is not call)
        self._disturbed.set()
