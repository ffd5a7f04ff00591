"""A rollout batch goes from the main rank to the ranks that train on it.

    main rank ─┬─ lengths, rewards, versions of all trajectories ────────────────────────────────► every rank
               └─ tokens and log-probs of those that a replica's micro-batches hold ─► its first rank ─► its others

A replica is what stands at one place of the data axis: its tensor, context and pipeline ranks. Legend: B trajectories;
3 lengths of each: of its prompt, its response and its log-probs.
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

ELSEWHERE = np.int32(-1), np.int32(-1), np.float32(np.nan)
"""What stands for the tokens of a prompt and of a response, and for log-probs, that a rank does not have."""


def share_out(
    worker: Worker, trajectories: Sequence[Trajectory] | None, batches: Sequence[Sequence[int]]
) -> list[Trajectory]:
    """The main rank's trajectories, on every rank with the tokens that its own micro-batches hold.

    For others' tokens `ELSEWHERE` stands in arrays of their lengths, which take no memory; only the main rank has texts
    and turns. `batches` are the indices of the trajectories that are laid out together. Of the other ranks
    `trajectories` are None, and `batches` do not count. Collective.
    """
    groups, outline = worker.groups, None
    if trajectories is not None:
        lengths_B3 = np.array([[len(array) for array in _arrays(t)] for t in trajectories])
        outline = [_bare(t) for t in trajectories], lengths_B3, _holdings(worker, trajectories, batches)
    bare, lengths_B3, holdings = broadcast_object(outline, groups)
    held = holdings[groups.data.rank]
    values = torch.empty(int(lengths_B3[held].sum()), dtype=torch.int32)
    if trajectories is not None:
        for replica in range(1, groups.data.size):
            send(_flat(trajectories[i] for i in holdings[replica]), groups.data, replica)
        values = _flat(trajectories[i] for i in held)
    elif groups.is_replica_leader:
        receive({0: values}, groups.data)
    broadcast_in_replica(values, groups)
    if trajectories is not None:
        return list(trajectories)
    shared = [
        _with_arrays(t, map(np.broadcast_to, ELSEWHERE, lengths)) for t, lengths in zip(bare, lengths_B3, strict=True)
    ]
    arrays = iter(np.split(values.numpy(), np.cumsum(lengths_B3[held])))
    for index in held:
        shared[index] = _with_arrays(bare[index], (next(arrays), next(arrays), next(arrays).view(np.float32)))
    return shared


def _holdings(worker: Worker, trajectories: Sequence[Trajectory], batches: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each replica the trajectories that its micro-batches hold, in ascending order."""
    if _all_at_once(worker.config):
        return [list(range(len(trajectories)))] * worker.groups.data.size
    examples = [Example(trajectory, advantage=0.0, weight=0.0) for trajectory in trajectories]
    holdings: list[set[int]] = [set() for _ in range(worker.groups.data.size)]
    for batch in batches:
        for held, plan in zip(holdings, worker.plans([examples[i] for i in batch]), strict=True):
            held.update(batch[place] for micro_batch in plan for place in micro_batch)
    return [sorted(held) for held in holdings]


def _all_at_once(config: Config) -> bool:
    """Whether every rank needs every log-prob: for correction over the whole batch, or for penalties of tokens."""
    return config.algorithm.rollout_correction.active or config.algorithm.kl_reward_coef > 0.0


def _bare(trajectory: Trajectory) -> Trajectory:
    """All but what is long."""
    nothing = np.zeros(0, np.int32)
    return _with_arrays(replace(trajectory, text="", answer=None, turns=()), (nothing, nothing, nothing))


def _arrays(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return trajectory.prompt_token_ids, trajectory.response_token_ids, trajectory.behaviour_log_probs


def _with_arrays(trajectory: Trajectory, arrays: Iterable[np.ndarray]) -> Trajectory:
    prompt, response, log_probs = arrays
    return replace(trajectory, prompt_token_ids=prompt, response_token_ids=response, behaviour_log_probs=log_probs)


def _flat(trajectories: Iterable[Trajectory]) -> torch.Tensor:
    """Their arrays one after another, int32; of log-probs the bits."""
    arrays = [array.view(np.int32) for trajectory in trajectories for array in _arrays(trajectory)]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *arrays]))
