"""Engines with a policy that is a hash, and with modelled time, for the virtual clock."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_bapo.errors import RunError
from megatron_bapo.records import Prompt
from megatron_bapo.rollout.generation import Sampling
from megatron_bapo.rollout.messages import Completion, EngineLost, Generated, GenerationRequest
from megatron_bapo.rollout.tokenization import TokenizedPrompt

END = 0
TOKEN_S = 0.01
"""Of one token of one answer, whatever else is in flight."""


def prompts(num: int) -> list[TokenizedPrompt]:
    return [
        TokenizedPrompt(
            Prompt(f"train:{i}", ({"role": "user", "content": str(i)},), f"truth {i}", "counting"),
            np.array([i + 1, 100], np.int32),
        )
        for i in range(num)
    ]


def next_token(version: int, context: Sequence[int], *, greedy: bool, seed: int, mean_length: int) -> int:
    """Of the policy `version`; END with a chance of 1 in `mean_length`."""
    key = (version, tuple(context), None if greedy else seed)
    draw = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest())
    return END if draw % mean_length == 0 else 1 + draw % 97


def log_prob(version: int, context: Sequence[int], token: int) -> float:
    return -1.0 - (hash((version, tuple(context), token)) % 1000) / 1000


def decode(token_ids: np.ndarray) -> str:
    return " ".join(str(token) for token in token_ids if token != END)


@dataclass
class _Call:
    start: float
    answers: list[tuple[list[int], list[float]]]
    num_told: list[int]


@dataclass
class ModelledEngine:
    """`version` is the policy that it has; faults are attributes that a test sets."""

    name: str = "engine 0"
    version: int = 0
    mean_length: int = 20
    dead: bool = False
    hangs: bool = False
    fails_on: set[int] = field(default_factory=set)
    """First prompt tokens whose requests raise."""
    log: list[tuple[float, GenerationRequest]] = field(default_factory=list)
    num_in_flight: int = 0
    most_in_flight: int = 0
    _cut: asyncio.Event = field(default_factory=asyncio.Event)
    _died: asyncio.Event = field(default_factory=asyncio.Event)
    _calls: dict[str, _Call] = field(default_factory=dict)

    def die(self) -> None:
        self.dead = True
        self._died.set()

    async def generate(self, request: GenerationRequest) -> Generated:
        loop = asyncio.get_running_loop()
        start = loop.time()
        self.log.append((start, request))
        if request.prompt_token_ids[0] in self.fails_on:
            raise RunError(f"{self.name} cannot answer {request.request_id}")
        answers = [self._answer(request, position) for position in range(request.n)]
        self._calls[request.request_id] = _Call(start, answers, [0] * request.n)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            await self._wait(max(len(tokens) for tokens, _ in answers) * TOKEN_S)
        finally:
            self.num_in_flight -= 1
            del self._calls[request.request_id]
        num_done = int((loop.time() - start) / TOKEN_S + 1e-6)
        return Generated(self.version, tuple(self._completion(*answer, num_done) for answer in answers))

    async def _wait(self, seconds: float) -> None:
        if self.dead:
            raise EngineLost(f"{self.name} died")
        events = [asyncio.ensure_future(event.wait()) for event in (self._cut, self._died)]
        timeout = None if self.hangs else seconds
        if self.hangs:
            events = events[1:]
        try:
            await asyncio.wait(events, timeout=timeout or 1e9, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for event in events:
                event.cancel()
        if self.dead:
            raise EngineLost(f"{self.name} died")

    def _answer(self, request: GenerationRequest, position: int) -> tuple[list[int], list[float]]:
        context, log_probs = request.prompt_token_ids.tolist(), []
        size = len(context)
        while len(log_probs) < request.max_tokens and (len(context) == size or context[-1] != END):
            greedy, seed = request.temperature < 1e-5, request.seed + position
            token = next_token(self.version, context, greedy=greedy, seed=seed, mean_length=self.mean_length)
            log_probs.append(log_prob(self.version, context, token))
            context.append(token)
        return context[size:], log_probs

    def _completion(self, tokens: list[int], log_probs: list[float], num_done: int) -> Completion:
        is_cut = num_done < len(tokens)
        end = "abort" if is_cut else "stop" if tokens[-1] == END else "length"
        tokens, log_probs = tokens[:num_done], log_probs[:num_done]
        ids = np.array(tokens, np.int32)
        return Completion(ids, np.array(log_probs, np.float32), end, decode(ids))

    async def abort(self) -> None:
        self._cut.set()
        self._cut = asyncio.Event()
        await asyncio.sleep(0.001)

    async def load_weights(self, version: int) -> None:
        assert self.num_in_flight == 0, "weights are not exchanged under requests in flight"
        await asyncio.sleep(0.5)
        self.version = version

    async def progress(self) -> dict[str, Generated]:
        if self.dead:
            raise EngineLost(f"{self.name} died")
        if self.hangs:
            await asyncio.sleep(1e9)
        return {
            request_id: Generated(
                self.version, tuple(self._news(call, position) for position in range(len(call.answers)))
            )
            for request_id, call in self._calls.items()
        }

    def _news(self, call: _Call, position: int) -> Completion:
        tokens, log_probs = call.answers[position]
        whole = self._completion(tokens, log_probs, int((asyncio.get_running_loop().time() - call.start) / TOKEN_S))
        start, call.num_told[position] = call.num_told[position], len(whole.token_ids)
        return replace(whole, token_ids=whole.token_ids[start:], log_probs=whole.log_probs[start:], text="")


SAMPLING = Sampling(n=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, max_response_length=50)
