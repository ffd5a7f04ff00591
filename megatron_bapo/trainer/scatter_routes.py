"""Scatters the routes of a rollout batch: each rank gets those of its own trajectories and its pipeline stage's layers.

Routes take hundreds of bytes per token, so a rank holds one message with the layers of all stages at a time.

Legend: L layers with experts of the whole model, or of a stage; K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from megatron_bapo.parallel.collectives import broadcast_in_replica, receive, send
from megatron_bapo.records import NO_ROUTE, Trajectory
from megatron_bapo.trainer.worker import Worker

MESSAGE_BYTES = 4 << 20
"""Size of a message, or that of one trajectory's routes if they are larger."""


def scatter_routes(
    worker: Worker,
    given: Sequence[np.ndarray | None] | None,
    scattered: Sequence[Trajectory],
    by_replica: Sequence[np.ndarray],
) -> list[Trajectory]:
    """Return the trajectories with the routes of those that this rank trains on.

    `given` are all routes on the main rank, None on others; `scattered` are the trajectories of `scatter_batch`, whose
    tokens are placeholders on ranks without them, and `by_replica` the indices of each replica's trajectories. The
    model must have routing replay. Collective.
    """
    groups, routing = worker.groups, worker.model.routing
    assert routing is not None, "the model replays routes"
    architecture = worker.model.architecture
    shape = len(architecture.moe_layers), architecture.num_experts_per_tok
    lengths = [len(t.prompt_token_ids) + len(t.response_token_ids) - 1 for t in scattered]
    dtype = np.dtype(f"i{architecture.route_item_bytes}")

    def messages(replica: int) -> list[np.ndarray]:
        sizes = np.array([lengths[i] for i in by_replica[replica]]) * architecture.route_bytes
        return [by_replica[replica][range_.start : range_.stop] for range_ in members_of_messages(sizes, MESSAGE_BYTES)]

    def content(members: np.ndarray) -> torch.Tensor:
        assert given is not None, "only the main rank has all routes"
        joined = np.concatenate([_routes_or_none(given[i], (lengths[i], *shape), dtype) for i in members])
        return torch.from_numpy(joined.view(np.uint8))

    if given is not None:
        for replica in range(1, groups.data.size):
            for members in messages(replica):
                send(content(members), groups.data, replica)
    found = [*scattered]
    for members in messages(groups.data.rank):
        num_tokens = sum(lengths[i] for i in members)
        values = torch.empty(num_tokens, shape[0], shape[1] * dtype.itemsize, dtype=torch.uint8)
        if given is not None:
            values = content(members)
        elif groups.is_replica_leader:
            receive({0: values}, groups.data)
        broadcast_in_replica(values, groups)
        own = values.numpy().view(dtype)[:, list(routing.layers)]
        starts = np.cumsum([0, *(lengths[i] for i in members)])
        for index, (start, end) in zip(members, pairwise(starts), strict=True):
            found[index] = replace(found[index], routes=own[start:end].copy())
    return found


def members_of_messages(sizes: np.ndarray, size: int) -> list[range]:
    """Divide trajectories of `sizes` into messages of about `size`, at least a trajectory each."""
    numbers = (np.cumsum(sizes) - 1) // size
    starts = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
    return [range(*each) for each in pairwise([*starts, len(sizes)])] if len(sizes) else []


def _routes_or_none(routes: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if routes is None:
        return np.full(shape, NO_ROUTE, dtype)
    assert routes.shape == shape, f"routes of shape {routes.shape} instead of {shape}"
    return np.ascontiguousarray(routes, dtype)
