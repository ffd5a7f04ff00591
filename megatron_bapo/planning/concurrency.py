"""How many responses an engine generates at once."""

from __future__ import annotations

from megatron_bapo.config.schema import Config
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.response_lengths import lengths_of
from megatron_bapo.planning.rollout_memory import EngineMemory


def concurrency(config: Config, engine: EngineMemory, assumptions: Assumptions) -> float:
    """Return the mean number of responses that an engine generates at once while others wait.

    It is at least 1 and at most `rollout.max_num_seqs`. vLLM starts a response when the tokens that the running ones
    have so far leave room for its prompt, and the router sends it about as many requests
    (`KV_OVERCOMMIT`).
    """
    lengths = lengths_of(config, assumptions)
    each = lengths.prompt / lengths.running_of_group(engine.sharing) + lengths.halfway + engine.state_tokens
    running = engine.kv_tokens / each
    return min(config.rollout.max_num_seqs, max(1.0, running))
