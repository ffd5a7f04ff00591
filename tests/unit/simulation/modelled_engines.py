"""Simulated engines with a hash function as policy, and with injected faults."""

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from megatron_bapo.errors import RunError
from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.records import Prompt
from megatron_bapo.rollout.in_flight_group import Sampling
from megatron_bapo.rollout.messages import Completion, EngineLost, Generated, GenerationRequest, SequenceScore
from megatron_bapo.rollout.tokenization import TokenizedPrompt
from megatron_bapo.simulation.modelled_engine import EngineModel, ModelledEngine, Policy

END = 0
TOKEN_S, LOAD_S, LOAD_LIMIT_S, NO_LIMIT_S = 0.01, 0.5, 1.0, 1e9
MODEL = EngineModel(
    DecodeCost(TOKEN_S, 0.0, 0.0, 0.0),
    prefill_s=0.0,
    sequence_s=0.0,
    kv_tokens=10**9,
    max_num_seqs=10**6,
    load_s=LOAD_S,
)
"""Each response token takes TOKEN_S, independent of other in-flight requests."""
T = TypeVar("T")


def prompts(num: int) -> list[TokenizedPrompt]:
    return [
        TokenizedPrompt(
            Prompt(f"train:{i}", ({"role": "user", "content": str(i)},), f"truth {i}", "counting"),
            np.array([i + 1, 100], np.int32),
        )
        for i in range(num)
    ]


def next_token(version: int, context: Sequence[int], *, greedy: bool, seed: int, mean_length: int) -> int:
    """Return the next token of policy `version`; it is END with a probability of 1 / `mean_length`."""
    key = (version, tuple(context), None if greedy else seed)
    number = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest())
    return END if number % mean_length == 0 else 1 + number % 97


def log_prob(version: int, context: Sequence[int], token: int) -> float:
    return -1.0 - (hash((version, tuple(context), token)) % 1000) / 1000


def context_log_probs(version: int, tokens: Sequence[int]) -> np.ndarray:
    """Return the log-probs of all tokens but the first, each given those before it."""
    return np.array([log_prob(version, tokens[:i], tokens[i]) for i in range(1, len(tokens))], np.float32)


def text_of(token_ids: np.ndarray) -> str:
    return " ".join(str(token) for token in token_ids if token != END)


async def decode(token_ids: np.ndarray) -> str:
    return text_of(token_ids)


def hashed(mean_length: int) -> Policy:
    """Return a policy that is a hash function, with responses of `mean_length` tokens on average."""

    def respond(request: GenerationRequest, position: int, version: int) -> Completion:
        context, log_probs = request.prompt_token_ids.tolist(), []
        size, greedy = len(context), request.temperature < 1e-5
        while len(log_probs) < request.max_tokens and (len(context) == size or context[-1] != END):
            token = next_token(version, context, greedy=greedy, seed=request.seed + position, mean_length=mean_length)
            log_probs.append(log_prob(version, context, token))
            context.append(token)
        token_ids = np.array(context[size:], np.int32)
        end = "stop" if context[-1] == END else "length"
        scored = context_log_probs(version, context[:size]) if request.scores_context else None
        completion = Completion(token_ids, np.array(log_probs, np.float32), end, text_of(token_ids))
        return replace(completion, context_log_probs=scored)

    return respond


@dataclass
class FaultyEngine:
    """Simulated engine with a request log; tests inject faults by setting its attributes."""

    name: str = "engine 0"
    mean_length: int = 20
    hangs: bool = False
    fails_on: set[int] = field(default_factory=set)
    """Requests raise RunError if their first prompt token is in this set."""
    log: list[tuple[float, GenerationRequest]] = field(default_factory=list)
    num_in_flight: int = 0
    most_in_flight: int = 0
    in_flight_when_scored: list[int] = field(default_factory=list)
    """Requests in flight at each call of `score`."""
    _died: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._engine = ModelledEngine(self.name, MODEL, hashed(self.mean_length))

    @property
    def version(self) -> int:
        """Policy version of its weights."""
        return self._engine.version

    @property
    def dead(self) -> bool:
        return self._died.is_set()

    def die(self) -> None:
        self._died.set()

    async def generate(self, request: GenerationRequest) -> Generated:
        self.log.append((asyncio.get_running_loop().time(), request))
        if request.prompt_token_ids[0] in self.fails_on:
            raise RunError(f"{self.name} cannot answer {request.request_id}")
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            return await self._unless_dead(self._engine.generate(request))
        finally:
            self.num_in_flight -= 1

    async def abort(self) -> None:
        if not self.hangs:
            await self._engine.abort()

    async def load_weights(self, version: int) -> None:
        await self._unless_dead(self._engine.load_weights(version), limit_s=LOAD_LIMIT_S)

    async def score(self, token_ids: np.ndarray, num_decoded: int) -> SequenceScore:
        self.in_flight_when_scored.append(self.num_in_flight)
        decoded = np.zeros(num_decoded, np.float32)
        return SequenceScore(self.version, np.zeros(len(token_ids) - 1, np.float32), decoded, decoded)

    async def progress(self) -> dict[str, Generated]:
        return await self._unless_dead(self._engine.progress())

    async def _unless_dead(self, coroutine: Coroutine[Any, Any, T], limit_s: float = NO_LIMIT_S) -> T:
        """Return the engine's result. Raises EngineLost if it dies, or after `limit_s` if it hangs."""
        call, died = asyncio.ensure_future(coroutine), asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({call, died}, return_when=asyncio.FIRST_COMPLETED)
            if self.hangs or self.dead:
                await asyncio.wait({died}, timeout=limit_s)
                raise EngineLost(f"{self.name} died")
            return call.result()
        finally:
            call.cancel()
            died.cancel()


SAMPLING = Sampling(n=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, max_response_length=50)
