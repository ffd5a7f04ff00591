"""How an engine generates its part of a batch: how many responses run, and how many tokens they have, over time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_bapo.config.rollout import KV_OVERCOMMIT
from megatron_bapo.planning.response_lengths import Lengths

NUM_INTERVALS = 64
"""Intervals in which the longest response is generated."""
LEAST = 1e-6
"""Number of responses that is taken for none."""


@dataclass(frozen=True)
class Interval:
    """The steps in which each running response gets the tokens of one interval."""

    running: float
    """Responses that run."""
    tokens: float
    """Tokens that they have in the KV cache."""


@dataclass
class _Cohort:
    """Responses with equally many tokens."""

    sent: float
    """Number of responses when they were sent; some of them have ended since."""
    age: int = 0
    """Intervals of which they have the tokens."""


@lru_cache(maxsize=4096)
def batch_course(
    lengths: Lengths, n: int, responses: float, kv_tokens: int, max_num_seqs: int, state_tokens: float = 0.0
) -> tuple[Interval, ...]:
    """Return the intervals of `interval_tokens(lengths)` steps from the first to the last response of an engine.

    Groups have `n` responses. The numbers are expectations, and may be fractions. As in rollout/router.py, responses
    wait until `KV_OVERCOMMIT` times the KV cache has room for their expected length; as in vLLM, the youngest stop when
    it is full. What a response keeps beside its tokens has the room of `state_tokens`.
    """
    return tuple(_intervals(lengths, n, responses, kv_tokens, max_num_seqs, state_tokens))


def interval_tokens(lengths: Lengths) -> float:
    return lengths.responses[-1] / NUM_INTERVALS


def _intervals(
    lengths: Lengths, n: int, responses: float, kv_tokens: int, max_num_seqs: int, state: float
) -> Iterator[Interval]:
    prompt, mean = lengths.prompt / lengths.running_of_group(n) + state, lengths.mean_response
    size = interval_tokens(lengths)
    tokens = [(age + 0.5) * size for age in range(NUM_INTERVALS)]
    share = [lengths.reaching(each) for each in tokens]
    room, waiting, cohorts = max(kv_tokens, lengths.prompt + state + lengths.responses[-1]), responses, list[_Cohort]()
    while True:
        expected = sum(c.sent * share[c.age] * (prompt + max(mean, tokens[c.age])) for c in cohorts)
        sent = min(waiting, max(0.0, KV_OVERCOMMIT * room - expected) / (prompt + mean))
        waiting -= sent
        cohorts.append(_Cohort(sent))
        running = used = 0.0
        stopped = list[_Cohort]()
        for cohort in cohorts:
            num = cohort.sent * share[cohort.age]
            each = prompt + tokens[cohort.age]
            fitting = max(0.0, min(num, max_num_seqs - running, (room - used) / each))
            running, used = running + fitting, used + fitting * each
            if num - fitting > LEAST:
                stopped.append(_Cohort((num - fitting) / share[cohort.age], cohort.age))
            cohort.sent, cohort.age = fitting / share[cohort.age], cohort.age + 1
        if running < LEAST:
            return
        yield Interval(running, used - running * state)
        cohorts = [each for each in cohorts if each.age < NUM_INTERVALS and each.sent > LEAST] + stopped
