"""Costs of a weight transfer plan: bytes per link, memory, and the bytes that determine its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from megatron_bapo.planning.weight_transfer import Traffic
from megatron_bapo.weight_sync.plan import FINGERPRINT_WORDS, ITEM_BYTES, NUM_BUFFERS, NUM_THREADS, Shards, WeightPlan


@dataclass(frozen=True)
class PlanFigures:
    """Bytes and memory of one weight transfer."""

    links: dict[tuple[int, int], int]
    """(trainer rank, host) -> bytes of the rank that the host receives, directly or from another host. Without stores:
    (GPU, GPU) -> bytes from one to the other."""
    reads: dict[tuple[int, int], int]
    """(host, engine rank) -> bytes that the engine rank on this host reads from the host's store."""
    peak_bytes: tuple[int, ...]
    """Peak memory of each trainer rank: its parameters, the buckets that it fills at a time, and without a store what a
    fingerprint needs."""
    network_bytes: int
    """Total bytes between hosts."""
    traffic: Traffic


def store_figures(plan: WeightPlan, trainer_shards: Shards, reader_hosts: Sequence[Sequence[int]]) -> PlanFigures:
    """Return the costs of a plan through stores; `trainer_shards` are the shards in the trainer ranks' memory."""
    links: Counter[tuple[int, int]] = Counter()
    reads: Counter[tuple[int, int]] = Counter()
    written: Counter[int] = Counter()
    outgoing: Counter[int] = Counter()
    incoming: Counter[int] = Counter()
    for bucket in plan.buckets:
        written[bucket.sender] += bucket.num_bytes
        for sending, receiving in pairwise(plan.chain(bucket, frozenset(bucket.hosts))):
            outgoing[sending] += bucket.num_bytes
            incoming[receiving] += bucket.num_bytes
        for host in bucket.hosts:
            links[bucket.sender, host] += bucket.num_bytes
            for reader in bucket.readers:
                if host in reader_hosts[reader]:
                    reads[host, reader] += bucket.num_bytes
    return PlanFigures(
        links=dict(sorted(links.items())),
        reads=dict(sorted(reads.items())),
        peak_bytes=_peak_bytes(plan, trainer_shards, NUM_THREADS),
        network_bytes=incoming.total(),
        traffic=Traffic(
            written=max(written.values()),
            crossing=max([*outgoing.values(), *incoming.values(), 0]),
            loaded=max(reads.values()),
        ),
    )


def direct_figures(plan: WeightPlan, trainer_shards: Shards, gpus_per_host: int, *, passes_on: bool) -> PlanFigures:
    """Return the costs of a plan from GPU to GPU, in which every GPU is a host of its own.

    GPUs pass buckets on along chains (`nccl`), or each one reads from the GPU that has the parameters (`cuda_ipc`),
    which may be itself. Layers follow each other, and the busiest GPU determines the time of each. Pieces of a bucket
    are passed on at once, so where a layer crosses the network, copies within hosts take no further time.
    """

    def crosses(pair: tuple[int, int]) -> bool:
        return pair[0] // gpus_per_host != pair[1] // gpus_per_host

    links: Counter[tuple[int, int]] = Counter()
    linked = sent = num_layers = 0
    for layer, buckets in groupby(plan.buckets, key=lambda bucket: bucket.layer):
        pairs: Counter[tuple[int, int]] = Counter()
        for bucket in buckets:
            chain = plan.chain(bucket, frozenset(bucket.hosts))
            for pair in pairwise(chain) if passes_on else ((chain[0], host) for host in bucket.hosts):
                pairs[pair] += bucket.num_bytes
        between = {pair: num_bytes for pair, num_bytes in pairs.items() if crosses(pair)}
        sent += _busiest(between)
        linked += 0 if between else _busiest(pairs)
        num_layers += layer is not None
        links += pairs
    return PlanFigures(
        links=dict(sorted(links.items())),
        reads={},
        peak_bytes=_peak_bytes(plan, trainer_shards, NUM_BUFFERS if passes_on else 0, FINGERPRINT_WORDS),
        network_bytes=sum(num_bytes for pair, num_bytes in links.items() if crosses(pair)),
        traffic=Traffic(linked=linked, sent=sent, num_layers=num_layers),
    )


def _busiest(pairs: Mapping[tuple[int, int], int]) -> int:
    """Return the most bytes that a GPU sends or receives."""
    outgoing, incoming = Counter[int](), Counter[int]()
    for (source, destination), num_bytes in pairs.items():
        outgoing[source] += num_bytes
        incoming[destination] += num_bytes
    return max([*outgoing.values(), *incoming.values(), 0])


def _peak_bytes(
    plan: WeightPlan, trainer_shards: Shards, num_buckets: int, fingerprint_words: int = 0
) -> tuple[int, ...]:
    """Return the bytes of each trainer rank's parameters, `num_buckets` of its largest buckets and a fingerprint.

    A fingerprint has two int64 of memory for each of at most `fingerprint_words` 4-byte words of a bucket.
    """
    num_bytes, largest_bucket = ([0] * len(plan.sender_hosts) for _ in range(2))
    for shards in trainer_shards.values():
        for shard in shards:
            for rank in shard.ranks:
                num_bytes[rank] += shard.box.size * ITEM_BYTES[plan.dtype]
    for bucket in plan.buckets:
        largest_bucket[bucket.sender] = max(largest_bucket[bucket.sender], bucket.num_bytes)
    return tuple(
        own + num_buckets * bucket + 16 * min(bucket // 4, fingerprint_words)
        for own, bucket in zip(num_bytes, largest_bucket, strict=True)
    )
