"""Tables of `plan --weights`: the bytes that a weight sync moves, and its memory and time."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megatron_bapo.config.lora_transfer import sent_adapters
from megatron_bapo.model.weight_layouts import EngineLayout, many_hosts, one_host, trainer_shards, weight_plan
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.weight_transfer import TransferSpeed
from megatron_bapo.weight_sync.plan_figures import PlanFigures, plan_figures

MAX_ROWS = 64


def print_weight_plan(
    console: Console, planned: Plan, ranks_per_host: int | None, network_gbit_s: float | None
) -> None:
    """Print bytes per link, peak memory per rank and estimated seconds of one full sync."""
    config, architecture, parallel = planned.config, planned.architecture, planned.config.parallel
    engine, colocated = EngineLayout.of(config.rollout), planned.placement == "colocated"
    placement = (
        one_host(parallel, engine)
        if ranks_per_host is None
        else many_hosts(parallel, engine, config.rollout.num_engines, ranks_per_host, colocated=colocated)
    )
    plan = weight_plan(
        architecture,
        parallel,
        engine,
        placement,
        dtype=config.model.dtype,
        bucket_bytes=config.weight_sync.bucket_mib << 20,
        lora=sent_adapters(config, architecture),
    )
    figures = plan_figures(plan, trainer_shards(architecture, parallel), placement.reader_hosts)
    speed = TransferSpeed.of(planned.gpu, planned.assumptions, network_gbit_s)
    num_slices = sum(len(bucket.slices) for bucket in plan.buckets)
    console.print(
        f"weight sync: {_gib(plan.total_bytes)} in {len(plan.shapes):,} tensors, cut into {num_slices:,} slices, "
        f"{len(plan.buckets):,} buckets of at most {config.weight_sync.bucket_mib} MiB",
        f"estimated {figures.traffic.seconds(speed):.3g} s until every engine has loaded a full sync, at "
        f"{min(speed.network, speed.connection) / 1e9:.3g} GB/s between hosts and {speed.store / 1e9:g} GB/s of each "
        f"rank to and from a store; {_gib(figures.network_bytes)} cross the network",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    for table in _tables(figures, plan.sender_hosts):
        console.print(table)


def _tables(figures: PlanFigures, sender_hosts: tuple[int, ...]) -> list[Table]:
    links = [
        (f"rank {rank}", f"host {host}", "memory" if sender_hosts[rank] == host else "network", _gib(num_bytes))
        for (rank, host), num_bytes in figures.links.items()
    ]
    reads = [
        (f"host {host}", f"engine rank {rank}", "memory", _gib(num_bytes))
        for (host, rank), num_bytes in figures.reads.items()
    ]
    memory = [
        (f"rank {rank}", f"host {host}", _gib(num_bytes))
        for rank, (host, num_bytes) in enumerate(zip(sender_hosts, figures.peak_bytes, strict=True))
    ]
    return [
        _table("trainer to stores", ("from", "to", "over", "bytes"), links),
        _table("stores to engines", ("from", "to each", "over", "bytes"), reads),
        _table("peak trainer memory", ("rank", "on", "parameters and buckets"), memory),
    ]


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    more = len(rows) - MAX_ROWS
    table = Table(*columns, title=title, title_justify="left", caption=f"and {more:,} more" if more > 0 else None)
    for row in rows[:MAX_ROWS]:
        table.add_row(*row)
    return table


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.3f} MiB"
