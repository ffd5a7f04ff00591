"""What a plan amounts to: bytes per link, memory, and seconds at given bandwidths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bapo.weight_sync.plan import ITEM_BYTES, NUM_THREADS, Shards, WeightPlan


@dataclass(frozen=True)
class Bandwidth:
    """Of every host, in bytes per second."""

    network: float
    """In each direction."""
    memory: float
    """Of copies into shared memory."""


@dataclass(frozen=True)
class PlanFigures:
    links: dict[tuple[int, int], int]
    """(trainer rank, host) -> bytes that the host gets from the rank."""
    reads: dict[tuple[int, int], int]
    """(host, engine rank) -> bytes that the rank of an engine there reads from the host's store."""
    peak_bytes: tuple[int, ...]
    """Of each trainer rank: its parameters, and as many of its largest bucket as it fills at a time."""
    network_bytes: int
    """Between hosts, all together."""
    seconds: float
    """Until every host has all bytes: the slowest host's copies into its store, then its slowest transfer."""


def plan_figures(
    plan: WeightPlan, held: Shards, reader_hosts: Sequence[Sequence[int]], bandwidth: Bandwidth
) -> PlanFigures:
    links: Counter[tuple[int, int]] = Counter()
    reads: Counter[tuple[int, int]] = Counter()
    written: Counter[int] = Counter()
    outgoing: Counter[int] = Counter()
    incoming: Counter[int] = Counter()
    largest_bucket = [0] * len(plan.sender_hosts)
    for bucket in plan.buckets:
        source = plan.sender_hosts[bucket.sender]
        written[source] += bucket.num_bytes
        largest_bucket[bucket.sender] = max(largest_bucket[bucket.sender], bucket.num_bytes)
        for host in bucket.hosts:
            links[bucket.sender, host] += bucket.num_bytes
            if host != source:
                outgoing[source] += bucket.num_bytes
                incoming[host] += bucket.num_bytes
            for reader in bucket.readers:
                if host in reader_hosts[reader]:
                    reads[host, reader] += bucket.num_bytes
    copying = max(written.values()) / bandwidth.memory
    sending = max([*outgoing.values(), *incoming.values(), 0]) / bandwidth.network
    parameters = _parameter_bytes(plan, held)
    return PlanFigures(
        links=dict(sorted(links.items())),
        reads=dict(sorted(reads.items())),
        peak_bytes=tuple(own + NUM_THREADS * bucket for own, bucket in zip(parameters, largest_bucket, strict=True)),
        network_bytes=incoming.total(),
        seconds=copying + sending,
    )


def _parameter_bytes(plan: WeightPlan, held: Shards) -> list[int]:
    num_bytes = [0] * len(plan.sender_hosts)
    for shards in held.values():
        for shard in shards:
            for rank in shard.ranks:
                num_bytes[rank] += shard.box.size * ITEM_BYTES[plan.dtype]
    return num_bytes
