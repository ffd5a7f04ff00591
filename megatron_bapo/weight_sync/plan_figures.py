"""Costs of a weight transfer plan through stores: bytes per link, memory, and the bytes that determine its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_bapo.planning.weight_transfer import Traffic
from megatron_bapo.weight_sync.plan import ITEM_BYTES, NUM_THREADS, Shards, WeightPlan


@dataclass(frozen=True)
class PlanFigures:
    """Bytes and memory of one weight transfer."""

    links: dict[tuple[int, int], int]
    """(trainer rank, host) -> bytes of the rank that the host receives, directly or from another host."""
    reads: dict[tuple[int, int], int]
    """(host, engine rank) -> bytes that the engine rank on this host reads from the host's store."""
    peak_bytes: tuple[int, ...]
    """Peak memory of each trainer rank: its parameters plus the buckets that it fills at a time."""
    network_bytes: int
    """Total bytes between hosts."""
    traffic: Traffic


def plan_figures(plan: WeightPlan, trainer_shards: Shards, reader_hosts: Sequence[Sequence[int]]) -> PlanFigures:
    """Return the costs of a plan; `trainer_shards` are the shards in the memory of the trainer ranks."""
    links: Counter[tuple[int, int]] = Counter()
    reads: Counter[tuple[int, int]] = Counter()
    written: Counter[int] = Counter()
    outgoing: Counter[int] = Counter()
    incoming: Counter[int] = Counter()
    largest_bucket = [0] * len(plan.sender_hosts)
    for bucket in plan.buckets:
        written[bucket.sender] += bucket.num_bytes
        largest_bucket[bucket.sender] = max(largest_bucket[bucket.sender], bucket.num_bytes)
        for sending, receiving in pairwise(plan.chain(bucket, bucket.hosts)):
            outgoing[sending] += bucket.num_bytes
            incoming[receiving] += bucket.num_bytes
        for host in bucket.hosts:
            links[bucket.sender, host] += bucket.num_bytes
            for reader in bucket.readers:
                if host in reader_hosts[reader]:
                    reads[host, reader] += bucket.num_bytes
    parameters = _parameter_bytes(plan, trainer_shards)
    return PlanFigures(
        links=dict(sorted(links.items())),
        reads=dict(sorted(reads.items())),
        peak_bytes=tuple(own + NUM_THREADS * bucket for own, bucket in zip(parameters, largest_bucket, strict=True)),
        network_bytes=incoming.total(),
        traffic=Traffic(
            written=max(written.values()),
            crossing=max([*outgoing.values(), *incoming.values(), 0]),
            loaded=max(reads.values()),
        ),
    )


def _parameter_bytes(plan: WeightPlan, trainer_shards: Shards) -> list[int]:
    num_bytes = [0] * len(plan.sender_hosts)
    for shards in trainer_shards.values():
        for shard in shards:
            for rank in shard.ranks:
                num_bytes[rank] += shard.box.size * ITEM_BYTES[plan.dtype]
    return num_bytes
