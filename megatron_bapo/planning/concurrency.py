"""How many responses an engine generates at once."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bapo.config.schema import Config
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.response_lengths import lengths_of
from megatron_bapo.planning.rollout_memory import EngineMemory


@dataclass(frozen=True)
class Concurrency:
    """Responses of one engine, at least 1 and at most `rollout.max_num_seqs`."""

    together: float
    """Responses that start together on an idle engine."""
    running: float
    """Mean number of responses that run while others wait."""


def concurrency(config: Config, engine: EngineMemory, assumptions: Assumptions) -> Concurrency:
    """Return the responses that an engine generates at once, if more than it has room for are waiting.

    vLLM starts a response when the tokens that the running ones have so far leave room for its prompt. The router sends
    it enough requests for that (`OVERCOMMIT` in rollout/router.py).
    """
    lengths, n, limit = lengths_of(config, assumptions), config.rollout.n, config.rollout.max_num_seqs
    together = engine.kv_tokens / lengths.peak_tokens
    running = engine.kv_tokens / (lengths.prompt / lengths.running_of_group(n) + lengths.halfway)
    return Concurrency(*(min(limit, max(1.0, num)) for num in (together, running)))
