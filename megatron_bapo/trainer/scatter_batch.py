"""Scatters a rollout batch from the main rank to the ranks that train on it.

    main rank ─┬─ lengths, rewards, versions of all trajectories ─────────────────────────────► every rank
               └─ tokens and log-probs of the trajectories of a replica ─► replica leader ─► its other ranks

A replica is one index of the data axis with all its tensor, context and pipeline ranks. Legend: B trajectories; 3 array
lengths per trajectory: prompt, response and log-probs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_bapo.config.schema import Config
from megatron_bapo.parallel.collectives import broadcast_in_replica, broadcast_object, receive, send
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.micro_batches import Example
from megatron_bapo.trainer.worker import Worker

PLACEHOLDER = np.int32(-1), np.int32(-1), np.float32(np.nan)
"""Placeholders for prompt tokens, response tokens and log-probs that a rank does not have."""


def scatter_batch(
    worker: Worker, trajectories: Sequence[Trajectory] | None, batches: Sequence[Sequence[int]]
) -> list[Trajectory]:
    """Return the main rank's trajectories on every rank, with the tokens of the rank's own micro-batches.

    The tokens of all other trajectories are arrays of the right length that repeat `PLACEHOLDER` and use no memory.
    Only the main rank has texts and turns. `batches` are the sets of trajectory indices that are packed together.
    `trajectories` and `batches` are read on the main rank only. Collective.
    """
    groups, header = worker.groups, None
    if trajectories is not None:
        lengths_B3 = np.array([[len(array) for array in _arrays(t)] for t in trajectories])
        header = [_metadata(t) for t in trajectories], lengths_B3, _indices_by_replica(worker, trajectories, batches)
    metadata, lengths_B3, by_replica = broadcast_object(header, groups)
    own = by_replica[groups.data.rank]
    values = torch.empty(int(lengths_B3[own].sum()), dtype=torch.int32)
    if trajectories is not None:
        for replica in range(1, groups.data.size):
            send(_flat(trajectories[i] for i in by_replica[replica]), groups.data, replica)
        values = _flat(trajectories[i] for i in own)
    elif groups.is_replica_leader:
        receive({0: values}, groups.data)
    broadcast_in_replica(values, groups)
    if trajectories is not None:
        return list(trajectories)
    scattered = [
        _with_arrays(t, map(np.broadcast_to, PLACEHOLDER, lengths))
        for t, lengths in zip(metadata, lengths_B3, strict=True)
    ]
    arrays = iter(np.split(values.numpy(), np.cumsum(lengths_B3[own])))
    for index in own:
        scattered[index] = _with_arrays(metadata[index], (next(arrays), next(arrays), next(arrays).view(np.float32)))
    return scattered


def _indices_by_replica(
    worker: Worker, trajectories: Sequence[Trajectory], batches: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return for each replica the indices of the trajectories in its micro-batches, in ascending order."""
    if _needs_all_log_probs(worker.config):
        return [list(range(len(trajectories)))] * worker.groups.data.size
    examples = [Example(trajectory, advantage=0.0, weight=0.0) for trajectory in trajectories]
    by_replica: list[set[int]] = [set() for _ in range(worker.groups.data.size)]
    for batch in batches:
        for indices, plan in zip(by_replica, worker.plans([examples[i] for i in batch]), strict=True):
            indices.update(batch[index] for micro_batch in plan for index in micro_batch)
    return [sorted(indices) for indices in by_replica]


def _needs_all_log_probs(config: Config) -> bool:
    """Whether every rank needs all log-probs: for rollout correction of the whole batch, or for token penalties."""
    return config.algorithm.rollout_correction.active or config.algorithm.kl_reward_coef > 0.0


def _metadata(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory without its arrays and texts."""
    empty = np.zeros(0, np.int32)
    return _with_arrays(replace(trajectory, text="", answer=None, turns=()), (empty, empty, empty))


def _arrays(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return trajectory.prompt_token_ids, trajectory.response_token_ids, trajectory.behaviour_log_probs


def _with_arrays(trajectory: Trajectory, arrays: Iterable[np.ndarray]) -> Trajectory:
    prompt, response, log_probs = arrays
    return replace(trajectory, prompt_token_ids=prompt, response_token_ids=response, behaviour_log_probs=log_probs)


def _flat(trajectories: Iterable[Trajectory]) -> torch.Tensor:
    """Concatenate the arrays of the trajectories as int32; log-probs are reinterpreted bit by bit."""
    arrays = [array.view(np.int32) for trajectory in trajectories for array in _arrays(trajectory)]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *arrays]))
