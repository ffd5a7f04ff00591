"""Weight transfer from GPU to GPU: buckets travel from a trainer rank along a chain of the engine ranks that need them.

In these plans every rank is a separate host: trainer ranks first, then the ranks of each engine. The first engine rank
of a bucket's chain receives each piece from the trainer rank and passes it on to the next one at once, so every byte
leaves the trainer once, reaches each rank once, and crosses the network once per engine host, because the ranks of a
host follow each other. NCCL moves pieces between GPUs of one host over NVLink, between hosts over the network.

The order is that of `Chain.links`: every rank processes its buckets in plan order. Deadlocks are impossible. A rank
that has not finished the first unfinished bucket waits only for a rank before it in that bucket's chain, which starts
with a trainer rank, and a trainer rank waits for no other bucket. Two ranks begin the messages between them in the same
order, as NCCL requires, which has no tags.

A rank has at most two buckets in memory: while one is loaded, or sent, the next one arrives, or is packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.host_chain import PIECE_BYTES, Chain, Link
from megatron_bapo.weight_sync.plan import ITEM_BYTES, NUM_BUFFERS, Bucket, Slice, WeightPlan
from megatron_bapo.weight_sync.whole_tensors import fingerprint

TRAILER_BYTES = 24
"""Policy version and fingerprint at the end of a message, int64 [3]."""


class Streams(Protocol):
    """The queues of a device's work, for example `parallel.platform.DeviceStreams`."""

    device: torch.device

    def aside(self) -> AbstractContextManager[None]:
        """Queue this thread's work apart from that of other threads within the context."""
        ...

    def finish(self) -> None:
        """Wait until the device has done what this thread has queued."""
        ...


def send_slices(
    plan: WeightPlan, version: int, rank: int, read: Callable[[Slice], torch.Tensor], chain: Chain, streams: Streams
) -> int:
    """Send the buckets of a trainer rank to the first ranks of their chains and return the number of bytes.

    A bucket is packed while the one before is sent.
    """
    sending = deque[list[Any]]()
    num_bytes = 0
    for link in chain.links(plan, rank):
        assert link.destination is not None, "a trainer rank sends its buckets"
        bucket = plan.buckets[link.number]
        message = pack(plan, version, bucket, read, streams.device)
        sending.append([chain.group.send([piece], link.destination, 0) for piece in message.split(PIECE_BYTES)])
        if len(sending) == NUM_BUFFERS:
            _wait(sending.popleft(), streams)
        num_bytes += bucket.num_bytes
    for works in sending:
        _wait(works, streams)
    return num_bytes


def receive_slices(
    plan: WeightPlan, version: int, rank: int, chain: Chain, streams: Streams, loaded: set[int]
) -> Iterator[tuple[Slice, torch.Tensor]]:
    """Yield the verified slices that the rank at this place of the plan needs; a thread receives and passes them on.

    `loaded` are the numbers of buckets that an earlier attempt has yielded. They are only passed on, and those that are
    yielded are added. Raises RunError if a bucket arrives damaged, RuntimeError if another rank cannot be reached.
    """
    links = list(chain.links(plan, rank))
    with _relay(plan, links, chain, streams) as relay:
        for link in links:
            message = relay.arrived()
            if link.number not in loaded:
                yield from unpack(plan, version, plan.buckets[link.number], message)
                streams.finish()
                loaded.add(link.number)
            relay.release(message)


class _Relay:
    """Receives the buckets of a rank into two buffers and passes them on."""

    def __init__(self, plan: WeightPlan, links: Sequence[Link], chain: Chain, streams: Streams) -> None:
        self._plan, self._links, self._chain, self._streams = plan, links, chain, streams
        self._free, self._arrived = SimpleQueue[torch.Tensor | None](), SimpleQueue[torch.Tensor | BaseException]()
        self._sending = deque[list[Any]]()
        size = max((message_bytes(plan.buckets[link.number]) for link in links), default=0)
        for _ in range(min(NUM_BUFFERS, len(links))):
            self._free.put(torch.empty(size, dtype=torch.uint8, device=streams.device))

    def arrived(self) -> torch.Tensor:
        """Return the buffer with the next bucket. Raises the error of the transfer."""
        found = self._arrived.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def release(self, buffer: torch.Tensor | None) -> None:
        """Receive a further bucket into a buffer, or with None stop."""
        self._free.put(buffer)

    def run(self) -> None:
        """Transfer all buckets; the thread's function."""
        try:
            with self._streams.aside():
                self._transfer()
        except Exception as error:  # the thread that loads raises it
            self._arrived.put(error)

    def check(self) -> None:
        """Raise the error of a transfer that failed after the last bucket had arrived."""
        if not self._arrived.empty():
            self.arrived()

    def _transfer(self) -> None:
        for link in self._links:
            buffer = self._free.get()
            if buffer is None:
                return  # the thread that loads has stopped
            if len(self._sending) == NUM_BUFFERS:  # the buffer's last bucket may still be passed on
                _wait(self._sending.popleft(), self._streams)
            pieces = buffer[: message_bytes(self._plan.buckets[link.number])].split(PIECE_BYTES)
            assert link.source is not None, f"bucket {link.number} has no source"
            arriving = [(self._chain.group.recv([piece], link.source, 0), piece) for piece in pieces]
            self._sending.append([])
            for work, piece in arriving:
                work.wait()
                if link.destination is not None:
                    self._sending[-1].append(self._chain.group.send([piece], link.destination, 0))
            self._streams.finish()
            self._arrived.put(buffer)
        for works in self._sending:
            _wait(works, self._streams)


@contextmanager
def _relay(plan: WeightPlan, links: Sequence[Link], chain: Chain, streams: Streams) -> Iterator[_Relay]:
    """Run a relay's thread. Without an error the context ends when everything is passed on."""
    relay = _Relay(plan, links, chain, streams)
    thread = Thread(target=relay.run, daemon=True)
    thread.start()
    try:
        yield relay
    except BaseException:
        relay.release(None)  # the thread ends when the caller gives up the group
        raise
    thread.join()
    relay.check()


def _wait(works: Sequence[Any], streams: Streams) -> None:
    for work in works:
        work.wait()
    streams.finish()


def message_bytes(bucket: Bucket) -> int:
    """Return the size of a message: the slices, padding that aligns the trailer, and the trailer."""
    return bucket.num_bytes + -bucket.num_bytes % 8 + TRAILER_BYTES


def pack(
    plan: WeightPlan, version: int, bucket: Bucket, read: Callable[[Slice], torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Pack the slices of a bucket, the version and their fingerprint into one uint8 message."""
    message = torch.zeros(message_bytes(bucket), dtype=torch.uint8, device=device)
    for part, target in zip(bucket.slices, _views(plan, bucket, message), strict=True):
        value = read(part)
        assert value.dtype == target.dtype, f"{part.name} is {value.dtype}, not the plan's {target.dtype}"
        target.copy_(value)
    trailer = message[-TRAILER_BYTES:].view(torch.int64)
    trailer[0] = version
    trailer[1:] = fingerprint(message[:-TRAILER_BYTES])
    return message


def unpack(
    plan: WeightPlan, version: int, bucket: Bucket, message: torch.Tensor
) -> Iterator[tuple[Slice, torch.Tensor]]:
    """Iterate over views of the slices in the message at the start of a buffer.

    Raises RunError if it is of another version or the fingerprint does not match.
    """
    message = message[: message_bytes(bucket)]
    sent, found = message[-TRAILER_BYTES:].view(torch.int64), fingerprint(message[:-TRAILER_BYTES])
    if not torch.equal(sent[1:], found) or int(sent[0]) != version:
        raise RunError(
            f"weights from trainer rank {bucket.sender} ({bucket.slices[0].name}, ...) arrived damaged: expected "
            f"policy version {version} with checksum {sent[1:].tolist()}, found {int(sent[0])} with {found.tolist()}"
        )
    yield from zip(bucket.slices, _views(plan, bucket, message), strict=True)


def _views(plan: WeightPlan, bucket: Bucket, message: torch.Tensor) -> Iterator[torch.Tensor]:
    start, dtype, item_bytes = 0, getattr(torch, plan.dtype), ITEM_BYTES[plan.dtype]
    for part in bucket.slices:
        end = start + part.box.size * item_bytes
        yield message[start:end].view(dtype).view(part.box.shape)
        start = end
