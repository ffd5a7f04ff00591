"""Estimated seconds of one full weight transfer.

`plan`'s step time takes the bytes from the layouts alone (`traffic`); `weight_sync/plan_figures.py` adds them up from
the buckets of a transfer plan, for `plan --weights` and the bench. Both convert them to seconds here.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora_transfer import sent_adapters
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.planning.hardware import Assumptions, Gpu
from megatron_bapo.planning.parameters import (
    ChunkShape,
    Split,
    count_elements,
    num_parameters,
    num_trained_parameters,
)
from megatron_bapo.planning.precision import DTYPE_BYTES, engine_architecture

LAYER_S = 0.01
"""Seconds of starting the transfers of one layer's tensors from GPU to GPU. Estimated from NeMo-RL's reshard of a 4B
and a 30B model (docs/design-docs/nccl-reshard-refit.md), which take 0.2 to 1.0 s."""


@dataclass(frozen=True)
class TransferSpeed:
    """Bandwidths in bytes per second."""

    store: float
    """One rank that writes to a weight store or verifies its part, checksums included."""
    copy: float
    """One rank that copies between its GPU and host memory."""
    network: float
    """Network of a host, in each direction, over several connections."""
    connection: float
    """One TCP connection, over which a host receives from the one before it in the chain."""
    link: float
    """Two GPUs of a host, in each direction."""
    broadcast: float
    """One pipeline stage that broadcasts full tensors."""

    @classmethod
    def of(cls, gpu: Gpu, assumptions: Assumptions, network_gbit_s: float | None = None) -> TransferSpeed:
        """Return the bandwidths of hosts with such GPUs; `network_gbit_s` replaces that of a network adapter."""
        adapter = gpu.network_gb_s * 1e9 if network_gbit_s is None else network_gbit_s * 1e9 / 8
        return cls(
            store=assumptions.store_gb_s * 1e9,
            copy=assumptions.host_copy_gb_s * 1e9,
            network=adapter * assumptions.link_efficiency,
            connection=assumptions.connection_gb_s * 1e9,
            link=gpu.nvlink_gb_s * 1e9 * assumptions.link_efficiency,
            broadcast=assumptions.broadcast_gb_s * 1e9,
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes of one full transfer where they are most, in each of its phases, which follow each other."""

    written: float = 0.0
    """Bytes that one trainer rank writes to its host's store."""
    crossing: float = 0.0
    """Bytes that cross one host's network in one direction."""
    loaded: float = 0.0
    """Bytes that one engine rank verifies in its host's store and loads."""
    linked: float = 0.0
    """Bytes between one GPU and the other GPUs of its host in one direction, without a store."""
    broadcast: float = 0.0
    """Bytes that one pipeline stage broadcasts."""
    received: float = 0.0
    """Bytes of such broadcasts that one GPU receives from other hosts: each GPU receives the tensors of all stages."""
    sent: float = 0.0
    """Bytes between one GPU and those of other hosts in one direction, without a store."""
    num_layers: int = 0
    """Layers whose tensors are sent one after another, without a store."""

    def seconds(self, speed: TransferSpeed) -> float:
        """Return the time until every engine has loaded the version."""
        stored = (self.written + self.loaded) * (1 / speed.store + 1 / speed.copy)
        direct = self.linked / speed.link + self.sent / speed.network
        direct += max(self.broadcast / speed.broadcast, self.received / speed.network)
        return stored + self.crossing / min(speed.network, speed.connection) + direct + self.num_layers * LAYER_S


def sync_bytes(config: Config, architecture: Architecture) -> int:
    """Return the bytes of one policy version: all weights, or only the adapters."""
    lora = sent_adapters(config, architecture)
    num_sent = num_parameters(architecture) if lora is None else num_trained_parameters(architecture, lora)
    return num_sent * DTYPE_BYTES[config.model.dtype]


def loading_bytes(config: Config, architecture: Architecture, gpu: Gpu) -> int:
    """Return the bytes of GPU memory that an engine rank on a `gpu` needs beside its weights while it loads a version.

    vLLM keeps a layer's tensors until the last one arrives, and then builds the rank's part of the layer a second time
    (vllm/model_executor/model_loader/reload/layerwise.py). The tensors are whole (`weight_sync/whole_tensors.py`): they
    have room for the parts of all tensor-parallel ranks; only of experts does expert parallelism give a rank no more
    than its own. A weight store maps them in host memory. The largest layer counts, or the embedding.
    """
    if sent_adapters(config, architecture) is not None:
        return 0
    size = config.rollout.tensor_parallel_size
    expert = size if config.rollout.enable_expert_parallel else 1
    whole = (architecture, Split(expert=expert))
    own_split = Split(tensor=size, expert=expert, expert_tensor=size // expert)
    own = (engine_architecture(config, architecture, gpu), own_split)
    last = architecture.num_hidden_layers
    first_layer, last_layer, embedding = (
        (ChunkShape(layers, has_embedding=not layers, has_output=False),)
        for layers in (range(1), range(last - 1, last), range(0))
    )
    on_gpu = (own,) if config.weight_sync.transport == "store" else (own, whole)
    return DTYPE_BYTES[config.model.dtype] * max(
        sum(count_elements(as_loaded, split, part).total for as_loaded, split in on_gpu)
        for part in (first_layer, last_layer, embedding)
    )


def traffic(
    config: Config,
    architecture: Architecture,
    gpus_per_host: int,
    engine_gpus_per_host: int | None = None,
    *,
    broadcasts: bool = False,
    receives_parts: bool = False,
) -> Traffic:
    """Return the bytes of one full transfer, if the ranks that hold the same parameters share the work evenly.

    `engine_gpus_per_host` is given if separate engines have hosts of their own.
    `broadcasts` and `receives_parts` are `broadcasts_weights` and `engines_receive_parts` of `Assumptions`.
    """
    num_bytes, rollout, world = sync_bytes(config, architecture), config.rollout, config.parallel.world_size
    colocated = rollout.colocate
    engine_bytes, held = num_bytes / rollout.ranks_per_engine, held_bytes(config, architecture, gpus_per_host)
    num_ranks = world + (0 if colocated else config.num_engine_ranks)
    is_on_one_host = engine_gpus_per_host is None and num_ranks <= gpus_per_host
    if broadcasts:
        received = 0.0 if is_on_one_host else engine_bytes if receives_parts else num_bytes - held * colocated
        return Traffic(broadcast=num_bytes / config.parallel.pipeline_model_parallel_size, received=received)
    if config.weight_sync.transport != "store":
        near = held if colocated else 0.0
        return _direct(config, num_bytes, near, architecture.num_hidden_layers, is_on_one_host=is_on_one_host)
    if not colocated:
        # Trainer hosts with the same parameters each serve some of the engine hosts, which pass on what they receive.
        per_engine_host = engine_gpus_per_host or gpus_per_host
        num_replicas = max(1, held * -(-world // gpus_per_host) // num_bytes)
        num_chains = min(num_replicas, -(-config.num_engine_ranks // per_engine_host))
        needed = min(1.0, per_engine_host / rollout.ranks_per_engine) * num_bytes
        return Traffic(num_chains * num_bytes / world, 0.0 if is_on_one_host else needed, engine_bytes)
    return Traffic(held / min(world, gpus_per_host), num_bytes - held, engine_bytes)


def _direct(config: Config, num_bytes: int, held: float, num_layers: int, *, is_on_one_host: bool) -> Traffic:
    """Return the bytes of a transfer from GPU to GPU, of which the engine's host holds `held` bytes.

    Colocated engine ranks read their parts from the ranks that hold them; a rank that serves several engines is read as
    often. Otherwise each part is sent once and passed on from engine to engine. Buckets follow the layers, so that the
    ranks of one pipeline stage send, and those of one receive, at a time. What another host holds crosses the network,
    through each GPU's own adapter.
    """
    rollout, parallel = config.rollout, config.parallel
    if held:
        busiest = max(1 / rollout.ranks_per_engine, rollout.num_engines / parallel.world_size) * num_bytes
    else:
        num_sending = parallel.world_size // parallel.pipeline_model_parallel_size
        busiest = num_bytes / min(num_sending, rollout.tensor_parallel_size)
    if is_on_one_host:
        return Traffic(linked=busiest, num_layers=num_layers)
    near = held / num_bytes
    return Traffic(linked=busiest * near, sent=busiest * (1 - near), num_layers=num_layers)


def held_bytes(config: Config, architecture: Architecture, gpus_per_host: int) -> float:
    """Return the bytes of the different parameters on one of the trainer's hosts, the mean over hosts.

    Megatron's rank order is tp-cp-ep-dp-pp, so a host's consecutive ranks are of one pipeline stage, if it has enough.
    """
    parallel = config.parallel
    experts = len(architecture.moe_layers) * architecture.num_experts * 3
    experts *= architecture.hidden_size * architecture.moe_intermediate_size * DTYPE_BYTES[config.model.dtype]
    expert_tensor = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    return _held_share(parallel, gpus_per_host, parallel.tensor_model_parallel_size) * (
        sync_bytes(config, architecture) - experts
    ) + experts * _held_share(parallel, gpus_per_host, expert_tensor * parallel.expert_model_parallel_size)


def _held_share(parallel: ParallelConfig, gpus_per_host: int, num_shards: int) -> float:
    """Return the share of parameters on a host if consecutive ranks hold `num_shards` different parts of a stage."""
    num_ranks, stages = min(parallel.world_size, gpus_per_host), parallel.pipeline_model_parallel_size
    stages_on_host = max(1.0, num_ranks * stages / parallel.world_size)
    return stages_on_host / stages * min(1.0, num_ranks / stages_on_host / num_shards)
