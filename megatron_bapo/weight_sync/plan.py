"""The weight transfer plan: which trainer rank sends which part of each tensor to which host.

The plan is computed once from the layouts of the trainer and the engines. A part is a box: rows (and columns) of a
Hugging Face tensor. The shards of trainer ranks are split at the shard borders of engine ranks, so an engine rank reads
whole boxes only, and every box is sent once to each host where an engine rank needs it. Boxes of a layer with the same
sender, hosts and readers form buckets, the unit of transfer and of checksums. The buckets follow the layers, because an
engine has to keep the tensors of every incomplete layer in addition to its weights.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import groupby, pairwise, product
from typing import Any

Shape = tuple[int, ...]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
NUM_THREADS = 2
"""Number of buckets that a process works on at a time."""
NUM_BUFFERS = 2
"""Number of buckets that a rank has in memory while it sends or receives from GPU to GPU."""
FINGERPRINT_WORDS = 4 << 20
"""Number of 4-byte words that a fingerprint has in memory at a time as int64, beside as many positions."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor."""

    start: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def stop(self) -> Shape:
        return tuple(start + size for start, size in zip(self.start, self.shape, strict=True))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def covers(self, other: Box) -> bool:
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )


@dataclass(frozen=True)
class Shard:
    """A box and the ranks that have it (trainer) or need it (every engine)."""

    box: Box
    ranks: tuple[int, ...]


Shards = Mapping[str, Sequence[Shard]]
"""Shards by Hugging Face tensor name."""


@dataclass(frozen=True)
class Slice:
    """A box of a named tensor."""

    name: str
    box: Box


@dataclass(frozen=True)
class Bucket:
    """Slices that one trainer rank sends to the same hosts for the same engine ranks."""

    sender: int
    hosts: tuple[int, ...]
    readers: tuple[int, ...]
    """Ranks, within each engine, that read the bucket on these hosts."""
    slices: tuple[Slice, ...]
    num_bytes: int

    @property
    def layer(self) -> int | None:
        """Number of the layer whose tensors these are; None for embeddings and the like."""
        return _layer(self.slices[0].name)


@dataclass(frozen=True)
class WeightPlan:
    """Buckets of one weight transfer, identical for every version."""

    shapes: Mapping[str, Shape]
    """Shapes of the whole tensors."""
    dtype: str
    """Dtype of all tensors: PyTorch's name without `torch.`."""
    sender_hosts: tuple[int, ...]
    """Host of each trainer rank."""
    reader_layout: str
    """Name of the engine layout to which the reader ranks refer."""
    buckets: tuple[Bucket, ...]

    @property
    def num_senders(self) -> int:
        """Number of trainer ranks."""
        return len(self.sender_hosts)

    def sent_by(self, rank: int) -> list[int]:
        """Return the numbers of the buckets that a trainer rank sends, or writes once to its own host's store."""
        return [i for i, bucket in enumerate(self.buckets) if bucket.sender == rank]

    def needed_on(self, host: int) -> list[int]:
        """Return the numbers of the buckets that a host must receive, each from one sender."""
        return [i for i, bucket in enumerate(self.buckets) if host in bucket.hosts]

    def stored_on(self, host: int) -> list[int]:
        """Return the numbers of the buckets in a host's store: those that it needs and those that its ranks send."""
        return [i for i, bucket in enumerate(self.buckets) if host in (*bucket.hosts, self.sender_hosts[bucket.sender])]

    def read_by(self, reader: int, host: int) -> list[int]:
        """Return the numbers of the buckets that an engine rank reads from its host's store."""
        return [i for i in self.needed_on(host) if reader in self.buckets[i].readers]

    def chain(self, bucket: Bucket, receivers: frozenset[int]) -> list[int]:
        """Return the hosts that pass a bucket on to each other: the sender's, then those of `receivers` that need it.

        They start with the one after the sender's, so that all hosts pass on about the same number of bytes.
        """
        source = self.sender_hosts[bucket.sender]
        needing = receivers.intersection(bucket.hosts) - {source}
        return [source, *sorted(needing, key=lambda host: (host < source, host))]

    def num_bytes(self, buckets: Sequence[int]) -> int:
        """Return the total size of the buckets with these numbers."""
        return sum(self.buckets[i].num_bytes for i in buckets)

    @property
    def total_bytes(self) -> int:
        """Size of one copy of the model."""
        return sum(map(math.prod, self.shapes.values())) * ITEM_BYTES[self.dtype]

    @cached_property
    def digest(self) -> str:
        """Digest that identifies the plan."""
        return blake2b(json.dumps(self.to_json()).encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "sender_hosts": list(self.sender_hosts),
            "reader_layout": self.reader_layout,
            "buckets": [
                [
                    *(bucket.sender, list(bucket.hosts), list(bucket.readers), bucket.num_bytes),
                    [[part.name, list(part.box.start), list(part.box.shape)] for part in bucket.slices],
                ]
                for bucket in self.buckets
            ],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> WeightPlan:
        buckets = tuple(
            Bucket(
                sender,
                tuple(hosts),
                tuple(readers),
                tuple(Slice(name, Box(tuple(start), tuple(shape))) for name, start, shape in slices),
                num_bytes,
            )
            for sender, hosts, readers, num_bytes, slices in content["buckets"]
        )
        shapes = {name: tuple(shape) for name, shape in content["shapes"].items()}
        return cls(shapes, content["dtype"], tuple(content["sender_hosts"]), content["reader_layout"], buckets)


def make_plan(
    shapes: Mapping[str, Shape],
    dtype: str,
    trainer_shards: Shards,
    engine_shards: Shards,
    *,
    sender_hosts: Sequence[int],
    reader_hosts: Sequence[Sequence[int]],
    reader_layout: str,
    bucket_bytes: int,
    one_sender: bool = False,
) -> WeightPlan:
    """Plan the transfer of every tensor from the trainer ranks that have its shards to the hosts that need them.

    `sender_hosts` is the host of each trainer rank, and `reader_hosts` lists for each rank of an engine the hosts of
    that rank over all engines. A sender on the destination host is preferred, then the one with the fewest bytes. With
    `one_sender` a box has the same sender for all hosts, which pass it on to each other. A sender that sends to the
    first of them already is preferred, because NCCL creates a communicator for every pair of ranks.
    """
    assignment = _Assignment(sender_hosts, one_sender=one_sender)
    buckets: list[Bucket] = []
    for _, layer in groupby(_by_layer(shapes), _layer):
        open_buckets: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _OpenBucket] = defaultdict(_OpenBucket)
        for name, shard in ((tensor, shard) for tensor in layer for shard in trainer_shards[tensor]):
            for box, readers in _cut(shard.box, engine_shards[name], bucket_bytes // ITEM_BYTES[dtype]):
                num_bytes = box.size * ITEM_BYTES[dtype]
                hosts = sorted({host for reader in readers for host in reader_hosts[reader]})
                for sender, destinations in assignment.senders(shard.ranks, hosts, num_bytes).items():
                    key = sender, tuple(destinations), readers
                    bucket = open_buckets[key]
                    if bucket.slices and bucket.num_bytes + num_bytes > bucket_bytes:
                        buckets.append(Bucket(*key, tuple(bucket.slices), bucket.num_bytes))
                        bucket = open_buckets[key] = _OpenBucket()
                    bucket.slices.append(Slice(name, box))
                    bucket.num_bytes += num_bytes
        buckets += [Bucket(*key, tuple(bucket.slices), bucket.num_bytes) for key, bucket in open_buckets.items()]
    return WeightPlan(dict(shapes), dtype, tuple(sender_hosts), reader_layout, tuple(buckets))


def _layer(name: str) -> int | None:
    """Return the layer number in a Hugging Face tensor's name, None for embeddings and the like."""
    found = re.search(r"\blayers\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _by_layer(names: Iterable[str]) -> list[str]:
    """Sort names by layer; tensors without a layer come first."""
    return sorted(names, key=lambda name: -1 if (number := _layer(name)) is None else number)


@dataclass
class _OpenBucket:
    slices: list[Slice] = field(default_factory=list)
    num_bytes: int = 0


def _cut(box: Box, engine_shards: Sequence[Shard], max_size: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Split a box into pieces of at most `max_size` elements, or one row, each with the readers that need all of it."""
    readers_of = [(shard.box, shard.ranks) for shard in engine_shards]
    borders = []
    for dim, (low, high) in enumerate(zip(box.start, box.stop, strict=True)):
        cuts = {cut for part, _ in readers_of for cut in (part.start[dim], part.stop[dim]) if low < cut < high}
        borders.append(sorted({low, high, *cuts}))
    for spans in product(*(pairwise(cuts) for cuts in borders)):
        cell = Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
        readers = tuple(sorted({rank for part, ranks in readers_of if part.covers(cell) for rank in ranks}))
        if readers:
            yield from ((part, readers) for part in _rows(cell, max_size))


def _rows(box: Box, max_size: int) -> Iterator[Box]:
    if not box.shape:
        yield box
        return
    num_rows, rest = box.shape[0], box.shape[1:]
    step = max(1, max_size // max(1, math.prod(rest)))
    for row in range(0, num_rows, step):
        yield Box((box.start[0] + row, *box.start[1:]), (min(step, num_rows - row), *rest))


class _Assignment:
    """Assigns senders and tracks the bytes that each rank and host has to send."""

    def __init__(self, sender_hosts: Sequence[int], *, one_sender: bool) -> None:
        self._host, self._one_sender = sender_hosts, one_sender
        self._rank_bytes = [0] * len(sender_hosts)
        self._host_bytes = dict.fromkeys(sender_hosts, 0)
        self._pairs: set[tuple[int, int]] = set()
        """Senders and the first hosts of their boxes, if a box has one sender."""

    def senders(self, holders: Sequence[int], hosts: Sequence[int], num_bytes: int) -> dict[int, list[int]]:
        """Return sender -> destination hosts for one box; at most one sender per host is used."""
        if self._one_sender:
            first = hosts[0]
            sender = min(holders, key=lambda rank: ((rank, first) not in self._pairs, self._rank_bytes[rank], rank))
            self._pairs.add((sender, first))
            self._rank_bytes[sender] += num_bytes
            return {sender: list(hosts)}
        by_host: dict[int, list[int]] = defaultdict(list)
        for rank in holders:
            by_host[self._host[rank]].append(rank)
        sources: dict[int, list[int]] = defaultdict(list)
        for host in hosts:
            source = host if host in by_host else min(by_host, key=lambda other: (self._host_bytes[other], other))
            if source != host:
                self._host_bytes[source] += num_bytes
            sources[source].append(host)
        chosen = {}
        for source, destinations in sources.items():
            sender = min(by_host[source], key=lambda rank: (self._rank_bytes[rank], rank))
            self._rank_bytes[sender] += num_bytes
            chosen[sender] = destinations
        return chosen
