"""Transfers a version from the stores of the trainer's hosts to the stores of other hosts, along a chain of hosts.

The host of a bucket's sender sends the bucket to the first host that needs it. That host receives it directly into its
store's file and passes each piece on to the next host as soon as the piece has arrived. Every byte therefore leaves a
sender's host once and reaches every other host once, and the time hardly grows with the number of hosts.

A bucket travels as a header, then pieces. It is sent whole from file to file without a copy, or as differences to an
older version that all hosts have, if those are smaller. Each receiver verifies the checksum of every bucket in a thread
while the next bucket arrives, and commits the version at the end. Deadlocks are impossible: all hosts process the
buckets in plan order, so the hosts of the first unfinished bucket never wait for another bucket.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain as concatenated
from typing import Any, Protocol, TypeVar

import torch

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.delta import decode, encode
from megatron_bapo.weight_sync.plan import ITEM_BYTES, NUM_THREADS, WeightPlan
from megatron_bapo.weight_sync.transport import WeightStore, checksum
from megatron_bapo.weight_sync.version_file import MappedFile, raw_bytes

PIECE_BYTES = 8 << 20
"""Largest number of bytes that a host passes on at a time."""
NUM_SENDING = 4
"""Number of pieces that a host sends at a time."""
_HEADER = struct.Struct("<Q16s")
"""Number of bytes of the differences that follow, 0 if the whole bucket follows; and the bucket's checksum."""
_TAGS_PER_BUCKET = 1 << 14


T = TypeVar("T")


class Group(Protocol):
    """Interface of torch.distributed's ProcessGroupGloo."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> Any: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> Any: ...


@dataclass(frozen=True)
class Chain:
    """The hosts of a transfer and their process group."""

    group: Group
    ranks: Mapping[int, int]
    """Host number in the plan -> rank in the group."""
    receivers: tuple[int, ...]
    """Numbers of the hosts that lack the version."""

    def links(self, plan: WeightPlan, host: int) -> Iterator[_Link]:
        """Iterate over the buckets that a host sends or receives, in plan order."""
        for number, bucket in enumerate(plan.buckets):
            path = plan.chain(bucket, self.receivers)
            if host in path and len(path) > 1:
                place, ranks = path.index(host), [self.ranks[other] for other in path]
                yield _Link(number, ranks[place - 1] if place else None, (ranks[place + 1 :] or [None])[0])


@dataclass(frozen=True)
class _Link:
    """A bucket, the rank that it comes from and the rank that it goes to."""

    number: int
    source: int | None
    destination: int | None

    def tag(self, piece: int) -> int:
        """Return the tag of a piece; the header is piece 0."""
        assert piece < _TAGS_PER_BUCKET, f"bucket {self.number} has too many pieces"
        return self.number * _TAGS_PER_BUCKET + piece


@dataclass(frozen=True)
class SendResult:
    """Statistics of what a host sent from its own store."""

    num_bytes: int
    num_whole: int
    """Number of buckets sent whole."""
    num_changed: int
    """Number of buckets sent as differences."""


def send(store: WeightStore, version: int, host: int, chain: Chain, base: int | None = None) -> SendResult:
    """Send a trainer host's buckets of a committed version down the chain.

    `base` is an older version of the same plan that this store and those of all receivers have; without it all buckets
    are sent whole. Raises RunError if the version is not committed, or if another host cannot be reached.
    """
    manifest, plan = store.manifest(version), store.plan(version)
    new = _Buckets(plan, store.map(version))
    old = None if base is None else _Buckets(plan, store.map(base))
    outgoing, num_bytes, num_changed = _Outgoing(chain.group), 0, 0
    links = list(chain.links(plan, host))
    with _network_errors(version), ThreadPoolExecutor(NUM_THREADS) as executor:
        for link, changes in zip(links, _ahead(executor, partial(_changes, new, old), links), strict=True):
            pieces = new.pieces(link.number) if changes is None else _cut(changes)
            outgoing.send(link, 0, _header(changes, manifest.checksums[link.number]))
            for index, piece in enumerate(pieces, 1):
                outgoing.send(link, index, piece)
                num_bytes += len(piece)
            num_changed += changes is not None
        outgoing.finish()
    store.manifest(version)  # raises if the file was overwritten in the meantime
    return SendResult(num_bytes, len(links) - num_changed, num_changed)


def receive(
    store: WeightStore, version: int, plan: WeightPlan, host: int, chain: Chain, base: int | None = None
) -> None:
    """Receive a host's buckets of a version into its store, pass them on, and commit the version.

    `base` is the one that the senders use. Raises RunError if a bucket is damaged or another host cannot be reached;
    then nothing is committed.
    """
    old = None if base is None else _Buckets(plan, store.map(base))
    with store.bucket_writer(version, plan, host, "received") as writer:
        incoming = _Incoming(version, chain.group, _Buckets(plan, writer.mapped), old)
        with _network_errors(version), ThreadPoolExecutor(NUM_THREADS) as executor:
            checks = deque[tuple[int, Future[str]]]()
            for link in chain.links(plan, host):
                checks.append((link.number, executor.submit(incoming.receive(link))))
                if len(checks) > NUM_THREADS:
                    number, check = checks.popleft()
                    writer.checksums[number] = check.result()
            writer.checksums |= {number: check.result() for number, check in checks}
            incoming.outgoing.finish()
    store.commit(version, plan, host)


class _Buckets:
    """The buckets of one version in its mapped file."""

    def __init__(self, plan: WeightPlan, file: MappedFile) -> None:
        self.plan, self.file = plan, file

    def slices(self, number: int) -> Iterator[torch.Tensor]:
        return map(self.file.slice, self.plan.buckets[number].slices)

    def regions(self, number: int) -> list[torch.Tensor]:
        """Return the contiguous slices of a bucket, merged where they are adjacent in the file: uint8 [num_bytes]."""
        merged: list[list[int]] = []
        for start, stop in filter(None, map(self.file.span, self.plan.buckets[number].slices)):
            if merged and merged[-1][1] == start:
                merged[-1][1] = stop
            else:
                merged.append([start, stop])
        return [self.file.bytes(start, stop) for start, stop in merged]

    def strided(self, number: int) -> list[torch.Tensor]:
        """Return the slices of a bucket that are not contiguous in the file."""
        return [self.file.slice(part) for part in self.plan.buckets[number].slices if self.file.span(part) is None]

    def pieces(self, number: int) -> Iterator[torch.Tensor]:
        """Iterate over the bytes of a bucket: its regions, then copies of its strided slices."""
        for data in (*self.regions(number), *map(_bytes, self.strided(number))):
            yield from _cut(data)

    def joined(self, number: int) -> memoryview:
        """Return the concatenated slices of a bucket in a fresh buffer, or the region in the file if there is one."""
        regions, strided = self.regions(number), self.strided(number)
        if len(regions) == 1 and not strided:
            return raw_bytes(regions[0])
        return raw_bytes(torch.cat([_bytes(value) for value in self.slices(number)]))

    def checksum(self, number: int) -> str:
        return checksum(self.slices(number))


class _Outgoing:
    """Sends pieces in the background, a few at a time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending = deque[tuple[Any, torch.Tensor]]()

    def send(self, link: _Link, index: int, piece: torch.Tensor) -> None:
        """Send a piece to the link's destination if it has one. The piece must not change until `finish` returns."""
        if link.destination is None:
            return
        if len(self._pending) == NUM_SENDING:
            self._pending.popleft()[0].wait()
        self._pending.append((self._group.send([piece], link.destination, link.tag(index)), piece))

    def finish(self) -> None:
        """Return when everything is sent."""
        while self._pending:
            self._pending.popleft()[0].wait()


class _Incoming:
    """Receives buckets into a store's file and passes their pieces on."""

    def __init__(self, version: int, group: Group, new: _Buckets, old: _Buckets | None) -> None:
        self._version, self._group, self._new, self._old = version, group, new, old
        self.outgoing = _Outgoing(group)

    def receive(self, link: _Link) -> Callable[[], str]:
        """Receive a bucket; return the function that completes it in the file and returns its verified checksum."""
        header = torch.empty(_HEADER.size, dtype=torch.uint8)
        self._take(link, [header], 0)
        num_changes, digest = _HEADER.unpack(raw_bytes(header))
        if num_changes:
            changes = torch.empty(num_changes, dtype=torch.uint8)
            self._take(link, _cut(changes), 1)
            complete = partial(self._apply, link.number, changes)
        else:
            strided = self._new.strided(link.number)
            copies = [_bytes(torch.empty(value.shape, dtype=value.dtype)) for value in strided]
            self._take(link, concatenated.from_iterable(map(_cut, (*self._new.regions(link.number), *copies))), 1)
            complete = partial(_copy_each, copies, strided)
        return partial(self._verified, link.number, digest.hex(), complete)

    def _take(self, link: _Link, pieces: Iterable[torch.Tensor], first: int) -> None:
        """Receive pieces, numbered from `first`, and pass each on as soon as it has arrived."""
        assert link.source is not None, f"bucket {link.number} has no source"
        works = [
            (self._group.recv([piece], link.source, link.tag(index)), piece)
            for index, piece in enumerate(pieces, first)
        ]
        for index, (work, piece) in enumerate(works, first):
            work.wait()
            self.outgoing.send(link, index, piece)

    def _apply(self, number: int, changes: torch.Tensor) -> None:
        """Write the old bucket with its changes to the file."""
        assert self._old is not None, "differences were sent to a host without an older version"
        targets, olds = self._new.regions(number), self._old.regions(number)
        if len(targets) == 1 and not self._new.strided(number):
            targets[0].copy_(olds[0])
            decode(raw_bytes(changes), raw_bytes(targets[0]))
            return
        data = torch.frombuffer(decode(raw_bytes(changes), self._old.joined(number)), dtype=torch.uint8)
        slices = list(self._new.slices(number))
        _copy_each(data.split([value.nbytes for value in slices]), slices)

    def _verified(self, number: int, expected: str, complete: Callable[[], None]) -> str:
        complete()
        if (found := self._new.checksum(number)) != expected:
            raise RunError(
                f"bucket {number} of policy version {self._version} arrived with the checksum {found}, not {expected}"
            )
        return found


def _changes(new: _Buckets, old: _Buckets | None, link: _Link) -> torch.Tensor | None:
    """Return the differences of a bucket as a message, or None if the whole bucket should be sent."""
    if old is None:
        return None
    message = encode(new.joined(link.number), old.joined(link.number), ITEM_BYTES[new.plan.dtype])
    return None if message is None else torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _ahead(executor: Executor, task: Callable[[_Link], T], links: Sequence[_Link]) -> Iterator[T]:
    """Iterate over the results of a task for each link; the next ones are computed in threads meanwhile."""
    pending = deque[Future[T]]()
    for position in range(len(links)):
        for link in links[position + len(pending) : position + NUM_THREADS + 1]:
            pending.append(executor.submit(task, link))
        yield pending.popleft().result()


def _header(changes: torch.Tensor | None, digest: str) -> torch.Tensor:
    packed = _HEADER.pack(0 if changes is None else len(changes), bytes.fromhex(digest))
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, which is copied unless it is contiguous: uint8 [num_bytes]."""
    return value.contiguous().view(-1).view(torch.uint8)


def _cut(data: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return data.split(PIECE_BYTES)


def _copy_each(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy bytes to the values that they belong to."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.view(target.dtype).view(target.shape))


@contextmanager
def _network_errors(version: int) -> Iterator[None]:
    """Turn the backend's errors into RunError."""
    try:
        yield
    except RunError:
        raise
    except RuntimeError as error:  # gloo's errors have no class of their own
        raise RunError(f"the transfer of policy version {version} between hosts failed: {error}") from error
