"""Transfers a version from the stores of the trainer's hosts to the stores of other hosts, along a chain of hosts.

The host of a bucket's sender sends the bucket to the first host that needs it. That host receives it directly into its
store's file and passes each piece on to the next host as soon as the piece has arrived. Every byte therefore leaves a
sender's host once and reaches every other host once, and the time hardly grows with the number of hosts.

A bucket travels as a header, then pieces. It is sent whole from file to file without a copy, or as differences to an
older version that all hosts have, if those are smaller. A receiver whose file already has the older version's bytes
(`WeightStore.prepare`) writes only the differences. A receiver is ready for the next header before a bucket has
arrived, adds each piece to the bucket's checksum while the piece is in the processor's cache, and commits the version
at the end. Deadlocks are impossible: all hosts process the buckets in plan order, so the hosts of the first unfinished
bucket never wait for another bucket.

Two hosts begin the messages between them in the same order: for each of their buckets in plan order, the header and
then the pieces. Messages therefore need no tags, which gloo has and NCCL ignores.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from xxhash import xxh3_128

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.delta import decode, encode
from megatron_bapo.weight_sync.plan import ITEM_BYTES, NUM_THREADS, WeightPlan
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.version_file import MappedFile, raw_bytes

PIECE_BYTES = 8 << 20
"""Largest number of bytes that a host passes on at a time."""
NUM_SENDING = 4
"""Number of pieces that a host sends at a time."""
_HEADER = struct.Struct("<Q16s")
"""Number of bytes of the differences that follow, 0 if the whole bucket follows; and the bucket's checksum."""


T = TypeVar("T")


class Group(Protocol):
    """Interface of torch.distributed's backends for messages from and to host memory, for example ProcessGroupGloo.

    Messages from one rank to another arrive in the order in which they were sent.
    """

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

    def links(self, plan: WeightPlan, host: int) -> Iterator[Link]:
        """Iterate over the buckets that a host sends or receives, in plan order."""
        receivers = frozenset(self.receivers)
        for number, bucket in enumerate(plan.buckets):
            if host != plan.sender_hosts[bucket.sender] and host not in bucket.hosts:
                continue  # most buckets of a large transfer are those of other hosts
            path = plan.chain(bucket, receivers)
            if host in path and len(path) > 1:
                place, ranks = path.index(host), [self.ranks[other] for other in path]
                yield Link(number, ranks[place - 1] if place else None, (ranks[place + 1 :] or [None])[0])


@dataclass(frozen=True)
class Link:
    """A bucket, the rank that it comes from and the rank that it goes to."""

    number: int
    source: int | None
    destination: int | None


def send(store: WeightStore, version: int, host: int, chain: Chain, base: int | None = None) -> int:
    """Send a trainer host's buckets of a committed version down the chain; return the number of bytes.

    `base` is an older version of the same plan that this store and those of all receivers have; without it all buckets
    are sent whole. Raises RunError if the version is not committed, or if another host cannot be reached.
    """
    manifest, plan = store.manifest(version), store.plan(version)
    new = _Buckets(plan, store.map(version))
    old = None if base is None else _Buckets(plan, store.map(base))
    outgoing, num_bytes = _Outgoing(chain.group), 0
    links = list(chain.links(plan, host))
    with _network_errors(version), ThreadPoolExecutor(NUM_THREADS) as executor:
        for link, changes in zip(links, _ahead(executor, partial(_changes, new, old), links), strict=True):
            whole = (changes,) if changes is not None else map(_bytes, new.parts(link.number))
            outgoing.send(link, _header(changes, manifest.checksums[link.number]))
            for piece in (piece for data in whole for piece in data.split(PIECE_BYTES)):
                outgoing.send(link, piece)
                num_bytes += len(piece)
        outgoing.finish()
    store.manifest(version)  # raises if the file was overwritten in the meantime
    return num_bytes


def receive(
    store: WeightStore, version: int, plan: WeightPlan, host: int, chain: Chain, base: int | None = None
) -> None:
    """Receive a host's buckets of a version into its store, pass them on, and commit the version.

    `base` is the one that the senders use. Raises RunError if a bucket is damaged or another host cannot be reached;
    then nothing is committed.
    """
    with store.bucket_writer(version, plan, host, "received") as writer:
        new = _Buckets(plan, writer.mapped)
        old = None if base is None else new if writer.base == base else _Buckets(plan, store.map(base))
        incoming = _Incoming(version, chain.group, new, old)
        with _network_errors(version), ThreadPoolExecutor(NUM_THREADS) as executor:
            checks = deque[tuple[int, Future[str]]]()
            for number, complete in incoming.buckets(list(chain.links(plan, host))):
                checks.append((number, executor.submit(complete)))
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

    def parts(self, number: int) -> list[torch.Tensor]:
        """Return the slices of a bucket: contiguous ones as uint8 [num_bytes], merged where they are adjacent."""
        spans: list[list[int] | torch.Tensor] = []
        for part in self.plan.buckets[number].slices:
            span = self.file.span(part)
            if span is None:
                spans.append(self.file.slice(part))
            elif spans and isinstance(spans[-1], list) and spans[-1][1] == span[0]:
                spans[-1][1] = span[1]
            else:
                spans.append(list(span))
        return [self.file.bytes(*span) if isinstance(span, list) else span for span in spans]


class _Outgoing:
    """Sends pieces in the background, a few at a time."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending = deque[tuple[Any, torch.Tensor]]()

    def send(self, link: Link, piece: torch.Tensor) -> None:
        """Send a message to the link's destination if it has one. It must not change until `finish` returns."""
        if link.destination is None:
            return
        if len(self._pending) == NUM_SENDING:
            self._pending.popleft()[0].wait()
        self._pending.append((self._group.send([piece], link.destination, 0), piece))

    def finish(self) -> None:
        """Return when everything is sent."""
        while self._pending:
            self._pending.popleft()[0].wait()


class _Incoming:
    """Receives buckets into a store's file and passes their pieces on."""

    def __init__(self, version: int, group: Group, new: _Buckets, old: _Buckets | None) -> None:
        """`old` has the bytes that differences refer to; it is `new` if that file has them."""
        self._version, self._group, self._new, self._old = version, group, new, old
        self.outgoing = _Outgoing(group)

    def buckets(self, links: Sequence[Link]) -> Iterator[tuple[int, Callable[[], str]]]:
        """Receive buckets and pass each piece on as soon as it has arrived.

        Yields the number of each bucket and the function that completes it in the file and returns its checksum.
        """
        headers = (self._expect(link, _empty(_HEADER.size)) for link in links)
        header = next(headers, None)
        for link in links:
            assert header is not None
            self._pass_on(link, *header)
            num_changes, digest = _HEADER.unpack(raw_bytes(header[1]))
            hasher = xxh3_128()
            targets, complete = self._targets(link.number, num_changes, hasher)
            arriving = [self._expect(link, piece) for target in targets for piece in target.split(PIECE_BYTES)]
            header = next(headers, None)  # its sender sends it after this bucket's pieces
            for work, piece in arriving:
                self._pass_on(link, work, piece)
                if not num_changes:
                    hasher.update(raw_bytes(piece))  # while the piece is in the processor's cache
            yield link.number, partial(self._verified, link.number, digest.hex(), hasher, complete)

    def _expect(self, link: Link, piece: torch.Tensor) -> tuple[Any, torch.Tensor]:
        assert link.source is not None, f"bucket {link.number} has no source"
        return self._group.recv([piece], link.source, 0), piece

    def _pass_on(self, link: Link, work: Any, piece: torch.Tensor) -> None:
        """Wait for a piece and pass it on."""
        work.wait()
        self.outgoing.send(link, piece)

    def _targets(
        self, number: int, num_changes: int, hasher: xxh3_128
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """Return the memory for what arrives of a bucket, and the function that completes the bucket in the file.

        Changes are applied by this function, which adds the bytes of the whole bucket to the hasher.
        """
        if num_changes:
            changes = _empty(num_changes)
            return [changes], partial(self._apply, number, changes, hasher)
        parts = self._new.parts(number)
        targets = _memory_for(parts)
        return targets, partial(_store, targets, parts)

    def _apply(self, number: int, changes: torch.Tensor, hasher: xxh3_128) -> None:
        """Write the old bucket with its changes to the file."""
        assert self._old is not None, "differences were sent to a host without an older version"
        parts = self._new.parts(number)
        if self._old is self._new:
            targets = list(map(_bytes, parts))
        else:
            targets = _memory_for(parts)
            for target, part in zip(targets, self._old.parts(number), strict=True):
                target.copy_(_bytes(part))
        try:
            decode(raw_bytes(changes), list(map(raw_bytes, targets)))
        except ValueError as error:
            raise RunError(f"bucket {number} of policy version {self._version} arrived damaged: {error}") from error
        for target in targets:
            hasher.update(raw_bytes(target))
        _store(targets, parts)

    def _verified(self, number: int, expected: str, hasher: xxh3_128, complete: Callable[[], None]) -> str:
        """Complete a bucket in the file and return its checksum, which must be the expected one."""
        complete()
        if (found := hasher.hexdigest()) != expected:
            raise RunError(
                f"bucket {number} of policy version {self._version} arrived with the checksum {found}, not {expected}"
            )
        return found


def _changes(new: _Buckets, old: _Buckets | None, link: Link) -> torch.Tensor | None:
    """Return the differences of a bucket as a message, or None if the whole bucket should be sent."""
    if old is None:
        return None
    after, before = ([raw_bytes(_bytes(part)) for part in buckets.parts(link.number)] for buckets in (new, old))
    message = encode(after, before, ITEM_BYTES[new.plan.dtype])
    return None if message is None else torch.from_numpy(message)


def _ahead(executor: Executor, task: Callable[[Link], T], links: Sequence[Link]) -> Iterator[T]:
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


def _memory_for(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory for the bytes of parts, uint8 [num_bytes]: the file's own for parts that are contiguous there."""
    return [part if part.dtype == torch.uint8 else _empty(part.nbytes) for part in parts]


def _empty(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _store(received: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Copy bytes to the parts of the file that they were not received into."""
    for source, target in zip(received, parts, strict=True):
        if source.data_ptr() != target.data_ptr():
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
