"""Buckets from trainer ranks straight to engine ranks, over a process group of both.

In such a plan every rank of both sides is a host of its own, numbered as in the group: the trainer's first, then the
engines', engine by engine. So each engine rank gets its own slices only, and copies for several engines come from
different replicas. Both ends go through their buckets in the plan's order: of all unfinished buckets the first one's
sender and receivers have nothing else to wait for, so that no order of arrival locks them.
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
    """One of torch.distributed's backends, e.g. ProcessGroupNCCL."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> Any: ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> Any: ...


def send_slices(
    plan: WeightPlan, rank: int, read: Callable[[Slice], torch.Tensor], group: Group, device: torch.device
) -> int:
    """Send what a trainer rank gives; the number of bytes. One bucket is on its way while the next one is packed."""
    underway: list[Any] = []
    num_bytes = 0
    for number in plan.sent_by(rank):
        bucket = plan.buckets[number]
        message = pack(plan, bucket, read, device)
        for work in underway:
            work.wait()
        underway = [group.send([message], host, 0) for host in bucket.hosts]
        num_bytes += bucket.num_bytes * len(bucket.hosts)
    for work in underway:
        work.wait()
    return num_bytes


def receive_slices(
    plan: WeightPlan, rank: int, group: Group, device: torch.device
) -> Iterator[tuple[Slice, torch.Tensor]]:
    """What the engine rank `rank` of the group needs, checked; a bucket is on its way while the last one is used.

    Raises RunError for a bucket that did not arrive as it was sent.
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
    """The slices, padded so that the checksum behind them is aligned."""
    return bucket.num_bytes + -bucket.num_bytes % 8 + CHECKSUM_BYTES


def pack(plan: WeightPlan, bucket: Bucket, read: Callable[[Slice], torch.Tensor], device: torch.device) -> torch.Tensor:
    """A bucket's slices one after the other, and their fingerprint; uint8."""
    message = torch.zeros(message_bytes(bucket), dtype=torch.uint8, device=device)
    for part, place in zip(bucket.slices, _places(plan, bucket, message), strict=True):
        value = read(part)
        assert value.dtype == place.dtype, f"{part.name} is {value.dtype}"
        place.copy_(value)
    message[-CHECKSUM_BYTES:].view(torch.int64).copy_(fingerprint(message[:-CHECKSUM_BYTES]))
    return message


def unpack(plan: WeightPlan, bucket: Bucket, message: torch.Tensor) -> Iterator[tuple[Slice, torch.Tensor]]:
    """Views of the slices. Raises RunError when the fingerprint is another."""
    expected, found = message[-CHECKSUM_BYTES:].view(torch.int64), fingerprint(message[:-CHECKSUM_BYTES])
    if not torch.equal(expected, found):
        raise RunError(
            f"weights from trainer rank {bucket.sender} ({bucket.slices[0].name}, ...) did not arrive as they were "
            f"sent: checksum {found.tolist()} in the place of {expected.tolist()}"
        )
    yield from zip(bucket.slices, _places(plan, bucket, message), strict=True)


def _places(plan: WeightPlan, bucket: Bucket, message: torch.Tensor) -> Iterator[torch.Tensor]:
    start, dtype, item_bytes = 0, getattr(torch, plan.dtype), ITEM_BYTES[plan.dtype]
    for part in bucket.slices:
        end = start + part.box.size * item_bytes
        yield message[start:end].view(dtype).view(part.box.shape)
        start = end
