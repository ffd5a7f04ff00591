"""Point-to-point weight transfer: buckets from trainer ranks to engine ranks over a process group of both.

In these plans every rank is a separate host, numbered as in the group: trainer ranks first, then the ranks of each
engine. Each engine rank therefore receives only its own slices, and copies for several engines come from different
replicas. Both sides process their buckets in plan order. Deadlocks are impossible: the sender and the receivers of the
first unfinished bucket never wait for any other bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.plan import ITEM_BYTES, Bucket, Slice, WeightPlan
from megatron_bapo.weight_sync.whole_tensors import fingerprint

CHECKSUM_BYTES = 16


class Group(Protocol):
    """Interface of torch.distributed's backends, for example ProcessGroupNCCL."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> Any: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> Any: ...


def send_slices(
    plan: WeightPlan, rank: int, read: Callable[[Slice], torch.Tensor], group: Group, device: torch.device
) -> int:
    """Send the buckets of a trainer rank and return the number of bytes. Sending overlaps with packing the next one."""
    pending: list[Any] = []
    num_bytes = 0
    for number in plan.sent_by(rank):
        bucket = plan.buckets[number]
        message = pack(plan, bucket, read, device)
        for work in pending:
            work.wait()
        pending = [group.send([message], host, 0) for host in bucket.hosts]
        num_bytes += bucket.num_bytes * len(bucket.hosts)
    for work in pending:
        work.wait()
    return num_bytes


def receive_slices(
    plan: WeightPlan, rank: int, group: Group, device: torch.device
) -> Iterator[tuple[Slice, torch.Tensor]]:
    """Receive and verify the slices that rank `rank` of the group needs; the next bucket is received meanwhile.

    Raises RunError if a bucket arrives damaged.
    """
    following = None
    for number in [*plan.needed_on(rank), None]:
        current = following
        if number is not None:
            bucket = plan.buckets[number]
            message = torch.empty(message_bytes(bucket), dtype=torch.uint8, device=device)
            following = bucket, message, group.recv([message], bucket.sender, 0)
        if current is not None:
            bucket, message, work = current
            work.wait()
            yield from unpack(plan, bucket, message)


def message_bytes(bucket: Bucket) -> int:
    """Return the size of a message: the slices, padding that aligns the checksum, and the checksum."""
    return bucket.num_bytes + -bucket.num_bytes % 8 + CHECKSUM_BYTES


def pack(plan: WeightPlan, bucket: Bucket, read: Callable[[Slice], torch.Tensor], device: torch.device) -> torch.Tensor:
    """Pack the slices of a bucket and their fingerprint into one uint8 message."""
    message = torch.zeros(message_bytes(bucket), dtype=torch.uint8, device=device)
    for part, target in zip(bucket.slices, _views(plan, bucket, message), strict=True):
        value = read(part)
        assert value.dtype == target.dtype, f"{part.name} is {value.dtype}, not the plan's {target.dtype}"
        target.copy_(value)
    message[-CHECKSUM_BYTES:].view(torch.int64).copy_(fingerprint(message[:-CHECKSUM_BYTES]))
    return message


def unpack(plan: WeightPlan, bucket: Bucket, message: torch.Tensor) -> Iterator[tuple[Slice, torch.Tensor]]:
    """Iterate over views of the slices in a message. Raises RunError if the fingerprint does not match."""
    expected, found = message[-CHECKSUM_BYTES:].view(torch.int64), fingerprint(message[:-CHECKSUM_BYTES])
    if not torch.equal(expected, found):
        raise RunError(
            f"weights from trainer rank {bucket.sender} ({bucket.slices[0].name}, ...) arrived damaged: expected "
            f"checksum {expected.tolist()}, found {found.tolist()}"
        )
    yield from zip(bucket.slices, _views(plan, bucket, message), strict=True)


def _views(plan: WeightPlan, bucket: Bucket, message: torch.Tensor) -> Iterator[torch.Tensor]:
    start, dtype, item_bytes = 0, getattr(torch, plan.dtype), ITEM_BYTES[plan.dtype]
    for part in bucket.slices:
        end = start + part.box.size * item_bytes
        yield message[start:end].view(dtype).view(part.box.shape)
        start = end
