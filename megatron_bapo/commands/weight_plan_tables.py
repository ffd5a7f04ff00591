"""Tables of `plan --weights`: the bytes that a weight sync moves, and its memory and time."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megatron_bapo.config.lora_transfer import sent_adapters
from megatron_bapo.config.schema import Config
from megatron_bapo.model.weight_layouts import (
    EngineLayout,
    Placement,
    many_hosts,
    one_host,
    one_host_per_gpu,
    trainer_shards,
    weight_plan,
)
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.weight_transfer import TransferSpeed
from megatron_bapo.weight_sync.plan_figures import PlanFigures, direct_figures, store_figures

MAX_ROWS = 64


def print_weight_plan(
    console: Console, planned: Plan, ranks_per_host: int | None, network_gbit_s: float | None
) -> None:
    """Print bytes per link, peak memory per rank and estimated seconds of one full sync."""
    config, architecture, sync = planned.config, planned.architecture, planned.config.weight_sync
    placement = _placement(planned, ranks_per_host)
    plan = weight_plan(
        architecture,
        config.parallel,
        EngineLayout.of(config.rollout),
        placement,
        dtype=config.model.dtype,
        bucket_bytes=sync.bucket_mib << 20,
        lora=sent_adapters(config, architecture),
    )
    shards = trainer_shards(architecture, config.parallel)
    speed = TransferSpeed.of(planned.gpu, planned.assumptions, network_gbit_s)
    gpus_per_host = ranks_per_host or planned.num_gpus
    if sync.transport == "store":
        figures = store_figures(plan, shards, placement.reader_hosts)
        speeds = (
            f"{min(speed.network, speed.connection) / 1e9:.3g} GB/s between hosts and {speed.store / 1e9:g} GB/s of "
            "each rank to and from a store"
        )
        tables = _store_tables(figures, plan.sender_hosts)
    else:
        figures = direct_figures(plan, shards, gpus_per_host, passes_on=sync.transport == "nccl")
        speeds = (
            f"{speed.network / 1e9:.3g} GB/s through each GPU's adapter between hosts, {speed.link / 1e9:.3g} GB/s "
            "within a host"
        )
        tables = _direct_tables(figures, config, gpus_per_host)
    num_slices = sum(len(bucket.slices) for bucket in plan.buckets)
    console.print(
        f"weight sync: {_gib(plan.total_bytes)} in {len(plan.shapes):,} tensors, cut into {num_slices:,} slices, "
        f"{len(plan.buckets):,} buckets of at most {sync.bucket_mib} MiB, by transport {sync.transport}",
        f"estimated {figures.traffic.seconds(speed):.3g} s until every engine has loaded a full sync, at {speeds}; "
        f"{_gib(figures.network_bytes)} cross the network",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    for table in tables:
        console.print(table)


def _placement(planned: Plan, ranks_per_host: int | None) -> Placement:
    config = planned.config
    parallel, engine = config.parallel, EngineLayout.of(config.rollout)
    if config.weight_sync.transport != "store":
        return one_host_per_gpu(config)
    if ranks_per_host is None:
        return one_host(parallel, engine)
    colocated = planned.placement == "colocated"
    return many_hosts(parallel, engine, config.rollout.num_engines, ranks_per_host, colocated=colocated)


def _store_tables(figures: PlanFigures, sender_hosts: tuple[int, ...]) -> list[Table]:
    links = [
        (f"rank {rank}", f"host {host}", "memory" if sender_hosts[rank] == host else "network", _gib(num_bytes))
        for (rank, host), num_bytes in figures.links.items()
    ]
    reads = [
        (f"host {host}", f"engine rank {rank}", "memory", _gib(num_bytes))
        for (host, rank), num_bytes in figures.reads.items()
    ]
    return [
        _table("trainer to stores", ("from", "to", "over", "bytes"), links),
        _table("stores to engines", ("from", "to each", "over", "bytes"), reads),
        _memory_table(figures, [f"host {host}" for host in sender_hosts]),
    ]


def _direct_tables(figures: PlanFigures, config: Config, gpus_per_host: int) -> list[Table]:
    """Return the tables of a transfer from GPU to GPU, whose GPUs are numbered as in `one_host_per_gpu`."""
    world_size, num_ranks = config.parallel.world_size, config.rollout.ranks_per_engine

    def engine(gpu: int) -> str:
        index, rank = divmod(gpu if config.rollout.colocate else gpu - world_size, num_ranks)
        return f"engine {index} rank {rank}"

    def medium(source: int, destination: int) -> str:
        if source == destination:
            return "memory"
        return "NVLink" if source // gpus_per_host == destination // gpus_per_host else "network"

    links = [
        (
            f"rank {source}" if source < world_size else engine(source),
            engine(destination),
            medium(source, destination),
            _gib(num_bytes),
        )
        for (source, destination), num_bytes in figures.links.items()
    ]
    hosts = [f"host {rank // gpus_per_host}" for rank in range(world_size)]
    return [_table("from GPU to GPU", ("from", "to", "over", "bytes"), links), _memory_table(figures, hosts)]


def _memory_table(figures: PlanFigures, hosts: list[str]) -> Table:
    rows = [
        (f"rank {rank}", host, _gib(num_bytes))
        for rank, (host, num_bytes) in enumerate(zip(hosts, figures.peak_bytes, strict=True))
    ]
    return _table("peak trainer memory", ("rank", "on", "parameters and buckets"), rows)


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    more = len(rows) - MAX_ROWS
    table = Table(*columns, title=title, title_justify="left", caption=f"and {more:,} more" if more > 0 else None)
    for row in rows[:MAX_ROWS]:
        table.add_row(*row)
    return table


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3f} MiB"
