"""Layouts of every Hugging Face tensor: the parts on the ranks of the trainer's mesh and of a vLLM engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.padding import round_up
from megatron_bapo.config.pipeline_layers import engine_stage, layer_stages
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.model.hf_mapping import Entry, entries, expected_shapes
from megatron_bapo.model.hf_table import TRAINED_TABLE, Table
from megatron_bapo.model.lora_mapping import sent_table
from megatron_bapo.model.row_layouts import lengths
from megatron_bapo.weight_sync.plan import Box, Shape, Shard, WeightPlan, make_plan
from megatron_bapo.weight_sync.route import WeightRoute

VLLM_VOCABULARY_MULTIPLE = 64
"""vLLM 0.32 pads the vocabulary to this multiple (vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE)."""


def _part(shape: Shape, dim: int, start: int, size: int) -> Box:
    """Return the box that is restricted in one dim and covers all others."""
    starts, sizes = [0] * len(shape), list(shape)
    starts[dim], sizes[dim] = start, size
    return Box(tuple(starts), tuple(sizes))


def trainer_shards(
    arch: Architecture, parallel: ParallelConfig, table: Table = TRAINED_TABLE
) -> dict[str, list[Shard]]:
    """Return the parts of every tensor in the table and the trainer ranks that have them.

    Ranks are in Megatron's order tp-cp-ep-dp-pp.
    The copy of the embedding in a tied output layer on the last pipeline stage is omitted.
    """
    stages = layer_stages(arch, parallel)
    return {
        name: shards
        for entry in entries(arch, table)
        for name, shards in _entry_shards(entry, arch, parallel, _stage(entry, stages))
    }


def _entry_shards(
    entry: Entry, arch: Architecture, parallel: ParallelConfig, stage_number: int
) -> Iterator[tuple[str, list[Shard]]]:
    row, pp, tp = entry.row, parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size
    num_ranks = parallel.world_size // pp
    stage = range(stage_number * num_ranks, (stage_number + 1) * num_ranks)
    if row.is_expert:
        ep, size = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
        first, stride = entry.expert // (arch.num_experts // ep) * size, size * ep
    else:
        size, first, stride = tp, 0, tp
    shapes = entry.shapes(arch)
    if row.layout is None:
        everywhere = tuple(sorted(holder for rank in range(size) for holder in stage[first + rank :: stride]))
        yield from (
            (name, [Shard(Box.whole(shape), everywhere)]) for name, shape in zip(entry.names, shapes, strict=True)
        )
        return
    found: dict[str, list[Shard]] = {name: [] for name in entry.names}
    for rank in range(size):
        holders = tuple(stage[first + rank :: stride])
        for piece in row.pieces(arch, rank, size):
            if piece.size:
                box = _part(shapes[piece.part], row.dim, piece.hf_start, piece.size)
                found[entry.names[piece.part]].append(Shard(box, holders))
    yield from found.items()


def _stage(entry: Entry, layer_stages: Sequence[int]) -> int:
    if entry.row.is_in_layers:
        return layer_stages[entry.layer]
    return layer_stages[0 if entry.row.megatron[0].startswith("embedding.") else -1]


@dataclass(frozen=True)
class EngineLayout:
    """Parallel layout of one vLLM engine. The tensor-parallel rank varies fastest, then the pipeline stage."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False
    """Whether each tensor-parallel rank has whole experts instead of a part of every expert."""

    @classmethod
    def of(cls, rollout: RolloutConfig) -> EngineLayout:
        return cls(rollout.tensor_parallel_size, rollout.pipeline_parallel_size, rollout.enable_expert_parallel)

    @property
    def name(self) -> str:
        return f"tp{self.tensor_parallel_size}-pp{self.pipeline_parallel_size}{'-ep' * self.expert_parallel}"

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


Span = tuple[int, int]
"""Index range (start, stop), where stop is exclusive."""


def _evenly(length: int, rank: int, size: int) -> Span:
    return rank * length // size, (rank + 1) * length // size


def _vocabulary(arch: Architecture, rank: int, size: int) -> Span:
    start, stop = _evenly(round_up(arch.vocab_size, VLLM_VOCABULARY_MULTIPLE), rank, size)
    return min(start, arch.vocab_size), min(stop, arch.vocab_size)


def _keys(arch: Architecture, rank: int, size: int) -> Span:
    """Return the rows of the key/value heads of a rank; with more ranks than heads, neighbours share a head."""
    heads = arch.num_key_value_heads
    start, stop = _evenly(heads, rank, size) if heads >= size else (rank * heads // size, rank * heads // size + 1)
    return start * arch.head_dim, stop * arch.head_dim


def _split_evenly(name: str) -> Callable[[Architecture, int, int], list[Span]]:
    return lambda arch, rank, size: [_evenly(lengths(arch)[name], rank, size)]


def _linear_query_key_value(arch: Architecture, rank: int, size: int) -> list[Span]:
    """Return the rows of a rank in the queries, in the keys behind them, and in the values behind these."""
    keys, values = arch.linear_key_width, arch.linear_value_width
    parts = ((0, keys), (keys, keys), (2 * keys, values))
    return [(first + start, first + stop) for first, rows in parts for start, stop in [_evenly(rows, rank, size)]]


_EVENLY = (
    *("heads", "queries", "values", "keys_and_values", "mlp", "shared_mlp", "expert_mlp"),
    *("linear_value_heads", "linear_values", "linear_qkvz", "linear_ba"),
)
_SPLIT_DIMS: dict[str, Callable[[Architecture, int, int], list[Span]]] = {
    "vocab": lambda arch, rank, size: [_vocabulary(arch, rank, size)],
    "keys": lambda arch, rank, size: [_keys(arch, rank, size)],
    "linear_qkv": _linear_query_key_value,
    **{name: _split_evenly(name) for name in _EVENLY},
}
"""Dims that vLLM's layers split, by their names in the table of `hf_table.py`; other dims are whole on every rank
(vllm/model_executor/layers/linear.py, vocab_parallel_embedding.py, fused_moe/layer.py,
mamba/gdn/qwen_gdn_linear_attn.py)."""


def engine_shards(arch: Architecture, engine: EngineLayout, table: Table = TRAINED_TABLE) -> dict[str, list[Shard]]:
    """Return the parts of every tensor in the table that the ranks of an engine need."""
    tp = engine.tensor_parallel_size
    return {
        name: [
            Shard(box, (stage * tp + rank,))
            for stage in _engine_stages(entry, arch, engine)
            for rank in range(tp)
            for box in _engine_boxes(entry, part, arch, engine, rank)
        ]
        for entry in entries(arch, table)
        for part, name in enumerate(entry.names)
    }


def _engine_boxes(entry: Entry, part: int, arch: Architecture, engine: EngineLayout, rank: int) -> list[Box]:
    shape, tp = entry.shapes(arch)[part], engine.tensor_parallel_size
    if entry.row.is_expert and engine.expert_parallel:
        return [Box.whole(shape)] if entry.expert in _local_experts(arch.num_experts, rank, tp) else []
    for dim, name in enumerate(entry.row.hugging_face[part][1].split()):
        if name in _SPLIT_DIMS:
            spans = _SPLIT_DIMS[name](arch, rank, tp)
            return [_part(shape, dim, start, stop - start) for start, stop in spans if start < stop]
    return [Box.whole(shape)]


def _local_experts(num_experts: int, rank: int, size: int) -> range:
    """Return a rank's consecutive experts; the first ranks may have one more than others.

    Source: vLLM, fused_moe/expert_map_manager.py, determine_expert_map.
    """
    each, more = divmod(num_experts, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _engine_stages(entry: Entry, arch: Architecture, engine: EngineLayout) -> list[int]:
    """Return the stages that have a tensor; a tied embedding is also the output layer of the last stage."""
    last = engine.pipeline_parallel_size - 1
    if entry.row.is_in_layers:
        return [engine_stage(entry.layer, arch.num_hidden_layers, engine.pipeline_parallel_size)]
    if not entry.row.megatron[0].startswith("embedding."):
        return [last]
    return sorted({0, last}) if arch.tie_word_embeddings else [0]


@dataclass(frozen=True)
class Placement:
    """The host of every trainer rank and, for each rank of an engine, its hosts over all engines."""

    sender_hosts: tuple[int, ...]
    reader_hosts: tuple[tuple[int, ...], ...]
    one_sender: bool = False
    """Whether a part has one sender for all hosts, which pass it on to each other."""


TRAINER_HOST, ENGINE_HOST = 0, 1


def one_host(parallel: ParallelConfig, engine: EngineLayout) -> Placement:
    """Place the trainer and all engines on the same host."""
    return Placement((TRAINER_HOST,) * parallel.world_size, ((TRAINER_HOST,),) * engine.num_ranks)


def many_hosts(
    parallel: ParallelConfig, engine: EngineLayout, num_engines: int, ranks_per_host: int, *, colocated: bool
) -> Placement:
    """Fill hosts in order with trainer ranks, and with engine ranks on the same hosts (colocated) or the next ones."""
    first = 0 if colocated else -(-parallel.world_size // ranks_per_host)
    return Placement(
        tuple(rank // ranks_per_host for rank in range(parallel.world_size)),
        tuple(
            tuple(sorted({first + (index * engine.num_ranks + rank) // ranks_per_host for index in range(num_engines)}))
            for rank in range(engine.num_ranks)
        ),
    )


def reader_hosts(rollout: RolloutConfig, engine_hosts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the hosts of each rank of an engine over all engines, from those of each of an engine's nodes."""
    return tuple(tuple(hosts) for hosts in engine_hosts for _ in range(rollout.ranks_per_engine_node))


def one_host_per_gpu(config: Config) -> Placement:
    """Place every GPU on a separate host, trainer ranks first, for transports that do not use host memory."""
    rollout = config.rollout
    engine = EngineLayout.of(rollout)
    placement = many_hosts(config.parallel, engine, rollout.num_engines, 1, colocated=rollout.colocate)
    return replace(placement, one_sender=not rollout.colocate)


def engine_places(config: Config, engine_index: int) -> range:
    """Return the places of an engine's ranks in the plan if every GPU is a separate host."""
    first = 0 if config.rollout.colocate else config.parallel.world_size
    num_ranks = EngineLayout.of(config.rollout).num_ranks
    return range(first + engine_index * num_ranks, first + (engine_index + 1) * num_ranks)


def engine_route(
    config: Config, engine_index: int, nodes: Sequence[tuple[Path, str]], rendezvous: str = ""
) -> WeightRoute:
    """Return the route by which an engine receives its weights.

    `nodes` are the folder of the weight store and the address of each of the engine's nodes, and `rendezvous` is where
    the ranks of a transfer group meet.
    """
    (folder, address), *others = nodes
    return WeightRoute(
        folder,
        config.weight_sync.transport,
        first_place=engine_places(config, engine_index).start,
        rendezvous=rendezvous,
        address=address,
        timeout_s=config.rollout.start_timeout_s,
        other_folders=tuple(other for other, _ in others),
        other_addresses=tuple(other for _, other in others),
    )


def weight_plan(
    arch: Architecture,
    parallel: ParallelConfig,
    engine: EngineLayout,
    placement: Placement,
    *,
    dtype: str,
    bucket_bytes: int,
    lora: LoraConfig | None = None,
) -> WeightPlan:
    """Return the weight transfer plan for the layouts of the trainer and the engines.

    `lora` are the adapters if only they are sent.
    """
    table = sent_table(lora)
    return make_plan(
        expected_shapes(arch, table),
        dtype,
        trainer_shards(arch, parallel, table),
        engine_shards(arch, engine, table),
        sender_hosts=placement.sender_hosts,
        reader_hosts=placement.reader_hosts,
        reader_layout=engine.name,
        bucket_bytes=bucket_bytes,
        one_sender=placement.one_sender,
    )
