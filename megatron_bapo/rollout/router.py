"""Route requests to engines: the oldest prompt first, to the engine with the fewest outstanding tokens.

An engine gets requests up to `KV_OVERCOMMIT` times what its KV cache is expected to hold. What an engine reports of its
requests corrects this: responses that have become longer than expected need more, and those that have ended need
nothing. Requests that must be alone are served one after the other by the emptiest engine, which gets no other requests
until then.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from megatron_bapo.config.rollout import KV_OVERCOMMIT
from megatron_bapo.errors import RunError
from megatron_bapo.event_loop import TurnBudget, answered_within
from megatron_bapo.rollout.messages import (
    CompletedRequest,
    EngineLost,
    Generated,
    GenerationEngine,
    GenerationRequest,
)
from megatron_bapo.rollout.partial_output import PartialOutput
from megatron_bapo.rollout.response_lengths import ResponseLengths

ABORT_AGAIN_S = 0.5
"""Seconds after which an engine whose requests have not ended is told again to abort them."""
T = TypeVar("T")
SENT_PER_TURN = 16
"""Most requests that are sent in one turn of the event loop: a prompt of 64k tokens takes a millisecond to send."""


@dataclass
class _InFlight:
    """A request on an engine."""

    request: GenerationRequest
    expected: int
    """Expected tokens of each of its completions."""
    partial: PartialOutput = field(default_factory=PartialOutput)
    """Partial output received so far."""
    num_ended: int = 0
    """Completions that have ended according to reports."""

    @property
    def tokens(self) -> int:
        """Tokens of the KV cache that it is expected to need."""
        lengths = self.partial.lengths or [(0, False)] * self.request.n
        running = (max(num, self.expected) for num, has_ended in lengths if not has_ended)
        return self.request.num_prompt_tokens + sum(running)


@dataclass
class _Slot:
    """An engine and its requests in flight."""

    name: str
    engine: GenerationEngine
    capacity_tokens: int
    lost: asyncio.Future[str]
    """Resolved with the reason when the engine is removed."""
    outstanding_tokens: int = 0
    requests: dict[str, _InFlight] = field(default_factory=dict)
    """Requests in flight, by request id."""
    num_lost_requests: int = 0
    """Number of requests in flight when the engine was removed."""

    def fits(self, tokens: int) -> bool:
        """Whether there is room for a request. One larger than the cache, whose completions the engine runs in turn,
        needs the room of a full cache, so that it does not wait for an idle engine."""
        needed = min(tokens, self.capacity_tokens)
        return not self.requests or self.outstanding_tokens + needed <= KV_OVERCOMMIT * self.capacity_tokens


@dataclass(order=True)
class _Waiting:
    """A request that waits for an engine."""

    prompt_serial: int
    arrival: int
    request: GenerationRequest = field(compare=False)
    prefer: str | None = field(compare=False)
    slot: asyncio.Future[_Slot] = field(compare=False)


class Router:
    """Holds the serving engines, which may be added and removed; requests wait while there is none."""

    def __init__(
        self,
        on_lost: Callable[[str, str], None] | None = None,
        on_completed: Callable[[CompletedRequest], None] | None = None,
    ) -> None:
        """`on_lost(name, reason)` is called for each removed engine, `on_completed` for each request that an engine
        returned, finished or aborted.
        """
        self._slots: dict[str, _Slot] = {}
        self._waiting: list[_Waiting] = []
        self._waiting_alone: deque[_Waiting] = deque()
        self._alone: str | None = None
        """Id of the request that is alone on an engine."""
        self._reserved: _Slot | None = None
        """The engine that serves this request, or will serve the next one."""
        self._arrivals = count()
        self._on_lost = on_lost
        self._on_completed = on_completed
        self._paused = False
        self._sends = TurnBudget(SENT_PER_TURN, self.dispatch)
        self._idle = asyncio.Event()
        self._idle.set()
        self.lengths = ResponseLengths()

    @property
    def engines(self) -> dict[str, GenerationEngine]:
        return {name: slot.engine for name, slot in self._slots.items()}

    def add(self, name: str, engine: GenerationEngine, capacity_tokens: int) -> None:
        """Add a serving engine whose KV cache holds `capacity_tokens` tokens."""
        assert name not in self._slots, f"the router already has {name}"
        self._slots[name] = _Slot(name, engine, capacity_tokens, asyncio.get_running_loop().create_future())
        self.dispatch()

    def remove(self, name: str, reason: str) -> None:
        """Remove an engine; its requests raise EngineLost. Does nothing if the engine was removed before."""
        slot = self._slots.pop(name, None)
        if slot is None:
            return
        slot.num_lost_requests = len(slot.requests)
        slot.lost.set_result(reason)
        if self._on_lost is not None:
            self._on_lost(name, reason)

    async def generate(
        self, request: GenerationRequest, *, prompt_serial: int = 0, prefer: str | None = None, alone: bool = False
    ) -> tuple[str, Generated]:
        """Send a request to an engine; return the engine's name and the output.

        Among waiting requests the lowest `prompt_serial` goes first. `prefer` names the engine that has the prompt in
        its prefix cache; it is chosen unless it is full. A request `alone` shares its engine with no other request.
        Raises EngineLost with the partial output if the engine is lost, and any error of the engine.
        """
        waiting = self._wait(request, prompt_serial, prefer, alone)
        slot = await self._acquired(waiting)
        sent_s = asyncio.get_running_loop().time()
        try:
            generated = await self._unless_lost(slot, lambda engine: engine.generate(request))
        except EngineLost as error:
            partial_output = slot.requests[request.request_id].partial.generated()
            raise EngineLost(str(error), partial_output, was_alone=slot.num_lost_requests == 1) from error
        finally:
            num_counted = self._release(slot, request.request_id)
        if self._on_completed is not None:
            self._on_completed(_completed(request, generated, prompt_serial, slot.name, sent_s))
        ended = [len(each.token_ids) for each in generated.completions if each.finish_reason != "abort"]
        for num_tokens in sorted(ended)[num_counted:]:  # reports have counted the first to end, which are the shortest
            self.lengths.add(num_tokens)
        return slot.name, generated

    async def on_every(self, action: Callable[[GenerationEngine], Awaitable[T]]) -> dict[str, T]:
        """Run `action` on every serving engine; return the results by engine name.

        An engine that is lost meanwhile is removed and has no result. Any other error of an engine is raised when all
        have returned.
        """
        slots = [*self._slots.values()]
        outcomes = await asyncio.gather(*(self._unless_lost(slot, action) for slot in slots), return_exceptions=True)
        results: dict[str, T] = {}
        for slot, outcome in zip(slots, outcomes, strict=True):
            if not isinstance(outcome, BaseException):
                results[slot.name] = outcome
            elif not isinstance(outcome, EngineLost):
                raise outcome
        return results

    def record_partial(self, progress: dict[str, dict[str, Generated]], *, dispatch: bool = True) -> None:
        """Record what the engines have generated for requests in flight since the last call, in case one is lost.

        `progress` is by engine name and request id. After a report that was lost nothing more is recorded of the
        request; a request that its engine received again is recorded from its beginning. Without `dispatch`, waiting
        requests do not get the new room yet: with many engines, looking for it takes longer than recording.
        """
        for name, delta in progress.items():
            slot = self._slots.get(name)
            if slot is not None:
                for request_id in delta.keys() & slot.requests.keys():
                    self._extend(slot, slot.requests[request_id], delta[request_id])
        if dispatch:
            self.dispatch()

    def partial_outputs(self) -> dict[str, Generated]:
        """Return the recorded partial outputs of requests in flight, by request id."""
        return {
            name: generated
            for slot in self._slots.values()
            for name, in_flight in slot.requests.items()
            if (generated := in_flight.partial.generated()) is not None
        }

    def pause(self) -> None:
        """Send no further requests until `resume`."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self.dispatch()

    async def abort(self, timeout_s: float) -> None:
        """Have every engine abort its requests in flight, after `pause`; return when none is in flight.

        An engine that does not end its requests in time is lost.
        """
        await asyncio.gather(*(self._abort(slot, timeout_s) for slot in [*self._slots.values()]))

    async def _abort(self, slot: _Slot, timeout_s: float) -> None:
        with suppress(EngineLost):
            try:
                async with answered_within(timeout_s):
                    # Again and again, because a request may reach the engine after the first abort.
                    while slot.requests:
                        await self._unless_lost(slot, lambda engine: engine.abort())
                        with suppress(TimeoutError):
                            async with asyncio.timeout(ABORT_AGAIN_S):
                                await self._idle.wait()
            except TimeoutError:
                self.remove(slot.name, f"{slot.name} did not abort its requests within {timeout_s:.0f} s")

    async def drain(self, timeout_s: float) -> None:
        """Wait until no request is in flight. Raises RunError that names the engines with pending requests."""
        try:
            async with answered_within(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            raise RunError(f"requests did not end within {timeout_s:.0f} s; still pending: {self.pending()}") from None

    def pending(self) -> str:
        """Describe the requests that have not returned: the number on each engine, and without an engine."""
        counts = [f"{slot.name} ({len(slot.requests)} requests)" for slot in self._slots.values() if slot.requests]
        if num_waiting := len(self._waiting) + len(self._waiting_alone):
            counts.append(f"no engine yet ({num_waiting} requests)")
        return ", ".join(counts) or "no request"

    def _extend(self, slot: _Slot, in_flight: _InFlight, delta: Generated) -> None:
        slot.outstanding_tokens -= in_flight.tokens
        in_flight.partial.extend(delta)
        slot.outstanding_tokens += in_flight.tokens
        ended = sorted(num for num, has_ended in in_flight.partial.lengths if has_ended)
        for num_tokens in ended[in_flight.num_ended :]:
            self.lengths.add(num_tokens)
        in_flight.num_ended = max(in_flight.num_ended, len(ended))

    def _wait(self, request: GenerationRequest, prompt_serial: int, prefer: str | None, alone: bool) -> _Waiting:
        future: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(prompt_serial, next(self._arrivals), request, prefer, future)
        if alone:
            self._waiting_alone.append(waiting)
        else:
            heapq.heappush(self._waiting, waiting)
        return waiting

    async def _acquired(self, waiting: _Waiting) -> _Slot:
        self.dispatch()
        try:
            return await waiting.slot
        except asyncio.CancelledError:
            if waiting.slot.done() and not waiting.slot.cancelled():
                self._release(waiting.slot.result(), waiting.request.request_id)
            raise

    def dispatch(self) -> None:
        """Send the waiting requests to the engines that have room."""
        if not self._paused:
            self._dispatch_alone()
        while self._waiting and not self._paused:
            first = self._waiting[0]
            if first.slot.done():  # its caller was cancelled
                heapq.heappop(self._waiting)
                continue
            slot = self._choose(self._in_flight(first.request).tokens, first.prefer)
            if slot is None or not self._sends.take():
                return
            heapq.heappop(self._waiting)
            self._assign(first, slot)

    def _dispatch_alone(self) -> None:
        """Reserve the emptiest engine for the next request that must be alone, and send it there once it is empty."""
        if self._alone is not None:
            return
        while self._waiting_alone and self._waiting_alone[0].slot.done():  # its caller was cancelled
            self._waiting_alone.popleft()
        self._reserved = None
        if self._waiting_alone:
            self._reserved = min(self._slots.values(), key=lambda slot: slot.outstanding_tokens, default=None)
        if self._reserved is not None and not self._reserved.requests:
            first = self._waiting_alone.popleft()
            self._alone = first.request.request_id
            self._assign(first, self._reserved)

    def _assign(self, waiting: _Waiting, slot: _Slot) -> None:
        in_flight = slot.requests[waiting.request.request_id] = self._in_flight(waiting.request)
        slot.outstanding_tokens += in_flight.tokens
        self._idle.clear()
        waiting.slot.set_result(slot)

    def _in_flight(self, request: GenerationRequest) -> _InFlight:
        return _InFlight(request, self.lengths.expected(request.max_tokens))

    def _choose(self, tokens: int, prefer: str | None) -> _Slot | None:
        fitting = [slot for slot in self._slots.values() if slot is not self._reserved and slot.fits(tokens)]
        preferred = [slot for slot in fitting if slot.name == prefer]
        return min(preferred or fitting, key=lambda slot: slot.outstanding_tokens, default=None)

    def _release(self, slot: _Slot, request_id: str) -> int:
        """Forget a request; return how many of its completions have been counted as ended."""
        in_flight = slot.requests.pop(request_id)
        slot.outstanding_tokens -= in_flight.tokens
        if request_id == self._alone:
            self._alone = None
        if not any(other.requests for other in self._slots.values()):
            self._idle.set()
        self.dispatch()
        return in_flight.num_ended

    async def _unless_lost(self, slot: _Slot, action: Callable[[GenerationEngine], Awaitable[T]]) -> T:
        """Run `action` on an engine; raises EngineLost as soon as the engine is removed.

        An EngineLost that `action` raises removes the engine. If the caller is cancelled, the call is cancelled and
        awaited first, so that the engine keeps no request that the router does not know of.
        """
        call = asyncio.ensure_future(action(slot.engine))
        try:
            await asyncio.wait({call, slot.lost}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait({call, slot.lost}, return_when=asyncio.FIRST_COMPLETED)
            raise
        call.cancel()  # no effect when it is done
        if slot.lost.done():
            call.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieve and ignore its error
            raise EngineLost(slot.lost.result())
        try:
            return call.result()
        except EngineLost as error:
            self.remove(slot.name, str(error))
            raise


def _completed(
    request: GenerationRequest, generated: Generated, prompt_serial: int, engine: str, sent_s: float
) -> CompletedRequest:
    return CompletedRequest(
        prompt_serial=prompt_serial,
        engine=engine,
        sent_s=sent_s,
        answered_s=asyncio.get_running_loop().time(),
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=tuple(len(completion.token_ids) for completion in generated.completions),
    )
