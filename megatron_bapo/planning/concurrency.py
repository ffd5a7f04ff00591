"""How many responses an engine generates at once, by the rule of the router (`rollout/router.py`) or of vLLM alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bapo.config.schema import Config
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.response_lengths import Lengths, lengths_of
from megatron_bapo.planning.rollout_memory import EngineMemory


@dataclass(frozen=True)
class Concurrency:
    """Responses of one engine, at least 1 and at most `rollout.max_num_seqs`."""

    together: float
    """Responses that start together on an idle engine."""
    running: float
    """Mean number of responses that run while others wait."""


def concurrency(config: Config, engine: EngineMemory, assumptions: Assumptions) -> Concurrency:
    """Return the responses that an engine generates at once, if more than it has room for are waiting."""
    lengths, n = lengths_of(config, assumptions), config.rollout.n
    by_room = _of_reserved_room if assumptions.reserves_room else _of_tokens_so_far
    limit = config.rollout.max_num_seqs
    return Concurrency(*(min(limit, max(1.0, num)) for num in by_room(lengths, n, engine.kv_tokens)))


def _of_reserved_room(lengths: Lengths, n: int, kv_tokens: int) -> tuple[float, float]:
    """Apply the router's rule: a group is sent when there is room for its prompt and for `n` responses of mean length.

    While a response runs, it counts as the mean length, or as its own once it is longer. The room that is free while
    the next group waits is half of what a group needs, on average. A group that needs more than the whole cache runs
    alone.
    """
    group, alone = lengths.prompt + n * lengths.mean_response, lengths.running_of_group(n)
    together = n * max(1, kv_tokens // group)
    return together, max(alone, (kv_tokens - group / 2) / (lengths.prompt / alone + lengths.reserved))


def _of_tokens_so_far(lengths: Lengths, n: int, kv_tokens: int) -> tuple[float, float]:
    """Apply vLLM's rule: a response starts when the tokens that running ones have so far leave room for its prompt."""
    return kv_tokens / lengths.peak_tokens, kv_tokens / (lengths.prompt / lengths.running_of_group(n) + lengths.halfway)
