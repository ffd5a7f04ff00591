"""Host memory of a node, and of the recorded routes of a mixture of experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.pipeline_layers import layer_stages
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.hardware import GIB, Assumptions
from megatron_bapo.planning.response_lengths import mean_length
from megatron_bapo.planning.rollout_memory import EngineMemory


@dataclass(frozen=True)
class HostMemory:
    """Host memory of the node with the most processes of one kind of nodes."""

    node: str
    """The kind, such as "a node of the engines"."""
    parts: dict[str, int]
    """Bytes by what they hold."""
    gib: float
    """Assumed memory of such a node."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def is_exceeded(self) -> bool:
        return self.num_bytes > self.gib * GIB


@dataclass(frozen=True)
class RecordedRoutes:
    """Bytes of the recorded routes of rollout batches of mean lengths."""

    rank: int
    """Those of a batch on the fullest rank: its trajectories, its stage's layers."""
    service: int
    """Those of the engines on the main node. The main rank has those of the batch that it scatters; the rollout service
    has as much for the next one, and for each of `rollout.max_staleness` more if rollouts may be stale."""
    engine: int
    """Those that one vLLM engine keeps of the tokens in its KV cache. It has a row for each layer of the model, of one
    byte per expert up to 256 experts (vllm/distributed/aux_output_connector/worker.py)."""


def recorded_routes(
    config: Config, architecture: Architecture, assumptions: Assumptions, engine: EngineMemory
) -> RecordedRoutes:
    """Return the bytes of recorded routes, all 0 without `algorithm.routing_replay`."""
    replay, rollout = config.algorithm.routing_replay, config.rollout
    if replay == "none":
        return RecordedRoutes(0, 0, 0)
    batch = int(config.trainer.train_batch_size * mean_length(config, assumptions) * architecture.route_bytes)
    stages = layer_stages(architecture, config.parallel)
    busiest = max(Counter(stages[layer] for layer in architecture.moe_layers).values(), default=0)
    rank = batch * busiest // (config.parallel.data_parallel_size * max(1, len(architecture.moe_layers)))
    if replay != "rollout":
        return RecordedRoutes(rank, 0, 0)
    itemsize = 1 if architecture.num_experts <= 256 else 2
    return RecordedRoutes(
        rank=rank,
        service=batch * (2 + (rollout.max_staleness if rollout.may_be_stale else 0)),
        engine=engine.kv_tokens * architecture.num_hidden_layers * architecture.num_experts_per_tok * itemsize,
    )
