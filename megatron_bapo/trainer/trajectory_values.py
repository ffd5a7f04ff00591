"""Values of trajectories that only some ranks can compute, because only these have the tokens.

Legend: B trajectories of the batch; K values of each; S sampled tokens of one, and T those of several, concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_bapo.parallel.collectives import max_over, sum_over, sum_to_main
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.batch_header import is_placeholder


def indices_with_tokens(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the indices of the trajectories that have more than the placeholders of `batch_header.py`."""
    return [i for i, trajectory in enumerate(trajectories) if not is_placeholder(trajectory.response_token_ids)]


def on_every_rank(own_K: Tensor, own: Sequence[int], num: int, groups: ParallelGroups) -> Tensor:
    """Return the values of all `num` trajectories, float64 [B, K], on every rank, unchanged to the last bit.

    `own_K` has those of the trajectories `own`. If several replicas have one, the values are the first one's. The
    ranks of a replica have the same. Collective.
    """
    values_BK = torch.zeros(num, own_K.shape[1], dtype=torch.float64, device=local_device())
    values_BK[own] = own_K.double().to(local_device())
    values_BK[~_is_first_B(own, num, groups)] = 0.0
    sum_over(groups.data)(values_BK)
    return values_BK.cpu()


def on_main_rank(own: Mapping[int, np.ndarray], lengths: Sequence[int], groups: ParallelGroups) -> list[np.ndarray]:
    """Return float64 values [S] of the tokens of all trajectories, of these lengths, on the main rank.

    `own` has those of the trajectories whose tokens this rank has, by index. The result is empty on all other ranks.
    Collective.
    """
    is_first = _is_first_B([*own], len(lengths), groups).tolist()
    gathered = []
    for index, length in enumerate(lengths):
        values_S = torch.zeros(length, dtype=torch.float64, device=local_device())
        if is_first[index] and groups.context.rank == 0:  # context-parallel ranks have the same trajectories
            values_S += torch.from_numpy(own[index]).to(local_device())
        sum_to_main(values_S, groups)
        if groups.is_main:
            gathered.append(values_S.cpu().numpy())
    return gathered


def _is_first_B(own: Sequence[int], num: int, groups: ParallelGroups) -> Tensor:
    """Return of which of `num` trajectories this replica is the first one that has them, bool [B]; it has `own`."""
    data = groups.data
    # The largest of these numbers is the first replica's; the others have 0.
    claims_B = torch.zeros(num, dtype=torch.float64, device=local_device())
    claims_B[own] = float(data.size - data.rank)
    first_B = claims_B.clone()
    max_over(data)(first_B)
    return (claims_B == first_B) & (claims_B > 0)


def token_sums(trajectories: Sequence[Trajectory], groups: ParallelGroups, *values_T: Tensor) -> Tensor:
    """Return the sums of values over the tokens of each trajectory, float64 [B, K], on every rank.

    The values [T] are those of the tokens that this rank has, concatenated. Collective.
    """
    own = indices_with_tokens(trajectories)
    lengths = [trajectories[i].num_sampled for i in own]
    by_trajectory = zip(*(values.split(lengths) for values in values_T), strict=True)
    sums = [[part.sum().item() for part in parts] for parts in by_trajectory]
    own_K = torch.tensor(sums, dtype=torch.float64).view(-1, len(values_T))
    return on_every_rank(own_K, own, len(trajectories), groups)


def concatenated(values: Sequence[np.ndarray | None]) -> torch.Tensor:
    """Concatenate arrays of the trajectories, of which a rank may have none, to a tensor, float64 [T]."""
    assert all(value is not None for value in values), "every trajectory must have been scored"
    return torch.from_numpy(np.concatenate([np.zeros(0), *(np.asarray(value, np.float64) for value in values)]))


def split_by_trajectory(values_T: torch.Tensor, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """Split values [T] into one array [S] per trajectory."""
    lengths = [trajectory.num_sampled for trajectory in trajectories]
    return np.split(values_T.numpy(), np.cumsum(lengths))[:-1]
