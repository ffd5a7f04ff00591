"""Small collectives over the axes of the trainer's mesh, one axis at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_bapo.parallel.groups import Axis, ParallelGroups
from megatron_bapo.parallel.platform import local_device

T = TypeVar("T")


def sum_over(*axes: Axis) -> Callable[[torch.Tensor], None]:
    """Return a callable that sums one tensor in place over the given axes."""

    def reduce(tensor: torch.Tensor) -> None:
        for axis in axes:
            if axis.size > 1:
                dist.all_reduce(tensor, group=axis.group)

    return reduce


def max_over(*axes: Axis) -> Callable[[torch.Tensor], None]:
    """Return a callable that takes the element-wise maximum of one tensor in place over the given axes."""

    def reduce(tensor: torch.Tensor) -> None:
        for axis in axes:
            if axis.size > 1:
                dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=axis.group)

    return reduce


def send(tensor: torch.Tensor, axis: Axis, to: int) -> None:
    """Send a tensor to another rank of the axis, which calls `receive`."""
    exchange({to: tensor}, {}, axis)


def receive(tensors: dict[int, torch.Tensor], axis: Axis) -> None:
    """Receive a tensor from each given rank of the axis into the contiguous tensor for that rank."""
    exchange({}, tensors, axis)


def exchange(outgoing: dict[int, torch.Tensor], incoming: dict[int, torch.Tensor], axis: Axis) -> None:
    """Send a tensor to some ranks of the axis, and receive one from some into the contiguous tensors for them.

    All are in one batch; NCCL creates a communicator for every pair of ranks with unbatched operations.
    """
    operations = [
        dist.P2POp(operation, tensor, axis.global_ranks[rank], axis.group)
        for operation, tensors in ((dist.isend, outgoing), (dist.irecv, incoming))
        for rank, tensor in tensors.items()
    ]
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()


def broadcast_from_last_stage(tensor: torch.Tensor, groups: ParallelGroups) -> torch.Tensor:
    """Overwrite `tensor` on every pipeline stage with the last stage's values; shapes must agree."""
    pipeline = groups.pipeline
    if pipeline.size > 1:
        dist.broadcast(tensor, src=pipeline.global_ranks[-1], group=pipeline.group)
    return tensor


def sum_to_main(tensor: torch.Tensor, groups: ParallelGroups) -> None:
    """Sum a tensor of the last pipeline stage over its data- and context-parallel ranks into the main rank's `tensor`.

    The contents on all other ranks are undefined afterwards; shapes must agree.
    """
    axis, pipeline = groups.data_context, groups.pipeline
    if groups.tensor.rank:
        return
    if groups.is_last_stage and axis.size > 1:
        dist.reduce(tensor, dst=axis.global_ranks[0], group=axis.group)
    if axis.rank or pipeline.size == 1:
        return
    if groups.is_last_stage:
        send(tensor, pipeline, 0)
    elif groups.is_first_stage:
        receive({pipeline.size - 1: tensor}, pipeline)


def broadcast_in_replica(tensor: torch.Tensor, groups: ParallelGroups) -> None:
    """Overwrite `tensor` on all ranks of a data-parallel replica with its leader's values; shapes must agree.

    Walks the mesh axis by axis: the leader is the first of its pipeline, context and tensor groups.
    """
    for axis in (groups.pipeline, groups.context, groups.tensor):
        if axis.size > 1:
            dist.broadcast(tensor, src=axis.global_ranks[0], group=axis.group)


def broadcast_object(value: Any, groups: ParallelGroups) -> Any:
    """Return global rank 0's value on every rank. All ranks run the same program, so pickling is safe.

    Walks the mesh axis by axis: rank 0 is the first of its pipeline, data-context and tensor groups.
    """
    box = [value]
    for axis in (groups.pipeline, groups.data_context, groups.tensor):
        if axis.size > 1:
            dist.broadcast_object_list(box, src=axis.global_ranks[0], group=axis.group)
    return box[0]


def on_main(call: Callable[[], T] | None, groups: ParallelGroups) -> T | None:
    """Return what `call` returns on the main rank; on all other ranks it is None, and so is the result.

    All ranks must call this function, but no collective is used, so that the call may take any time (`MainCalls`).
    """
    if groups.is_main:
        return groups.main_calls.make(call or (lambda: None))
    return groups.main_calls.wait()


def broadcast_object_from_last_stage(value: Any, groups: ParallelGroups) -> Any:
    """Return the last pipeline stage's value on every stage."""
    pipeline, box = groups.pipeline, [value]
    if pipeline.size > 1:
        dist.broadcast_object_list(box, src=pipeline.global_ranks[-1], group=pipeline.group)
    return box[0]


def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return every rank's value on all ranks of the axis, in rank order."""
    values = [value] * axis.size
    if axis.size > 1:
        dist.all_gather_object(values, value, group=axis.group)
    return values


def gather_by_rank(value: Any, groups: ParallelGroups) -> list[Any]:
    """Return every global rank's value on all ranks, in rank order."""
    found = [(groups.global_rank, value)]
    for axis in (groups.tensor, groups.data_context, groups.pipeline):
        found = [pair for part in gather_objects(found, axis) for pair in part]
    return [value for _, value in sorted(found, key=lambda pair: pair[0])]


def barrier(groups: ParallelGroups) -> None:
    """Return when every rank has called this function; each axis waits for the ranks that the axes before it joined."""
    arrived = torch.zeros(1, device=local_device())
    sum_over(groups.tensor, groups.data_context, groups.pipeline)(arrived)
    arrived.item()
