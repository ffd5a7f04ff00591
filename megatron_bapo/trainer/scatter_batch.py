"""Scatters a rollout batch from the main rank to the ranks that train on it.

    main rank ─┬─ header: lengths, rewards, versions of all trajectories ───────────────────────► every rank
               └─ tokens, log-probs and masks of a replica's trajectories ───────► replica leader ─► its other ranks

A replica is one index of the data axis with all its tensor, context and pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_bapo.freed_memory import FreedMemory
from megatron_bapo.parallel.collectives import broadcast_in_replica, broadcast_object, receive, send
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.batch_header import BatchHeader, with_words, without_tokens, words
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.scatter_routes import members_of_messages, scatter_routes
from megatron_bapo.trainer.worker import Worker

MESSAGE_WORDS = 1 << 18
"""Size of a message from the main rank to another one in 32-bit words, which are the memory that sending takes."""


def scatter_batch(
    worker: Worker,
    trajectories: list[Trajectory] | None,
    batches: Sequence[Sequence[int]],
    *,
    in_groups: bool = True,
) -> list[Trajectory]:
    """Return the main rank's trajectories on every rank, with the tokens of the rank's own micro-batches.

    The arrays of all other trajectories are placeholders of the right length. Only the main rank has texts and turns.
    Its own arrays are copies, and its list becomes the result, so that the batch is freed as it goes. `batches` are the
    sets of trajectory indices that are packed together, and `in_groups` says that the trajectories are whole groups,
    one after another. Of their routes, a rank gets those of its pipeline stage's layers. `trajectories` and `batches`
    are read on the main rank only. Collective.
    """
    groups, content, routes = worker.groups, None, None
    if trajectories is not None:
        routes = [trajectory.routes for trajectory in trajectories]
        content = BatchHeader.of(trajectories), _indices_by_replica(worker, trajectories, batches, in_groups)
    header, by_replica = broadcast_object(content, groups)
    own, num_words_B = by_replica[groups.data.rank], header.num_words_B
    values = torch.empty(int(num_words_B[own].sum()), dtype=torch.int32)
    if trajectories is not None:
        for replica in range(1, groups.data.size):
            theirs = by_replica[replica]
            for message in _messages([trajectories[i] for i in theirs], num_words_B[theirs]):
                send(message, groups.data, replica)
        for index in {*range(len(trajectories))}.difference(own.tolist()):
            trajectories[index] = without_tokens(trajectories[index])
        # Messages and other ranks' trajectories go before this rank's share takes their place.
        FreedMemory().add(4 * int(num_words_B.sum() - num_words_B[own].sum()))
        arrays = [array for i in own for array in words(trajectories[i])]
        np.concatenate([np.zeros(0, np.int32), *arrays], out=values.numpy())
    elif groups.is_replica_leader:
        for start, end in _bounds(num_words_B[own]):
            receive({0: values[start:end]}, groups.data)
    broadcast_in_replica(values, groups)
    scattered = header.trajectories() if trajectories is None else trajectories
    for index, part in zip(own, np.split(values.numpy(), np.cumsum(num_words_B[own])), strict=False):
        scattered[index] = with_words(without_tokens(scattered[index]), part)
    if header.has_routes and worker.config.algorithm.routing_replay == "rollout":
        scattered = scatter_routes(worker, routes, scattered, by_replica)
    return scattered


def _indices_by_replica(
    worker: Worker, trajectories: Sequence[Trajectory], batches: Sequence[Sequence[int]], in_groups: bool
) -> list[np.ndarray]:
    """Return for each replica the indices of the trajectories in its micro-batches, int32 in ascending order."""
    numbers = worker.config.group_numbers(len(trajectories)) if in_groups else [None] * len(trajectories)
    examples = [Example(each, 0.0, 0.0, group=group) for each, group in zip(trajectories, numbers, strict=True)]
    by_replica: list[set[int]] = [set() for _ in range(worker.groups.data.size)]
    for batch in batches:
        for indices, plan in zip(by_replica, worker.plans([examples[i] for i in batch]), strict=True):
            indices.update(batch[index] for micro_batch in plan for index in micro_batch)
    return [np.array(sorted(indices), np.int32) for indices in by_replica]


def _messages(trajectories: Sequence[Trajectory], sizes: np.ndarray) -> Iterator[torch.Tensor]:
    """Yield the words of whole trajectories, int32, with bounds as in `_bounds`; `sizes` are their numbers of words.

    All messages are in one buffer, so that a message is valid until the next one is taken.
    """
    buffer = np.empty(max((end - start for start, end in _bounds(sizes)), default=0), np.int32)
    for members in members_of_messages(sizes, MESSAGE_WORDS):
        arrays = [array for index in members for array in words(trajectories[index])]
        message = buffer[: sum(len(array) for array in arrays)]
        yield torch.from_numpy(np.concatenate(arrays, out=message))


def _bounds(sizes: np.ndarray) -> list[tuple[int, int]]:
    """Return where the messages with trajectories of `sizes` words start and end."""
    ends = np.cumsum([0, *sizes])
    return [
        (int(ends[members.start]), int(ends[members.stop])) for members in members_of_messages(sizes, MESSAGE_WORDS)
    ]
