"""Values of tokens that one data-parallel replica computes, for the replicas that train on these tokens.

A trajectory is scored by one replica and trained on by another one, or by several, because scoring and updates pack the
batch differently. Its values are sent to these only: no rank receives or allocates more than its own share.

Legend: T tokens of several trajectories, concatenated in ascending order of their indices in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_bapo.parallel.collectives import exchange, gather_objects
from megatron_bapo.parallel.groups import Axis


def for_own_trajectories(
    values_T: Tensor, computed_by: Sequence[Sequence[int]], own: Sequence[int], lengths: Sequence[int], data: Axis
) -> Tensor:
    """Return the values [T, ...] of the trajectories `own` of this replica. Collective over the data axis.

    `values_T` has those of `computed_by[data.rank]`: the trajectories that each replica has computed values of, every
    one on one replica. `lengths` are the numbers of tokens of all trajectories of the batch.
    """
    needed_by = gather_objects(np.array(own, np.int32), data)
    found = _by_trajectory(values_T, sorted(computed_by[data.rank]), lengths)
    others = [rank for rank in range(data.size) if rank != data.rank]
    sent = {other: [i for i in needed_by[other].tolist() if i in found] for other in others}
    received = {other: sorted({*own}.intersection(computed_by[other])) for other in others}
    outgoing = {other: torch.cat([found[i] for i in indices]) for other, indices in sent.items() if indices}
    incoming = {
        other: values_T.new_empty(sum(lengths[i] for i in indices), *values_T.shape[1:])
        for other, indices in received.items()
        if indices
    }
    exchange(outgoing, incoming, data)
    for other, values in incoming.items():
        found |= _by_trajectory(values, received[other], lengths)
    return torch.cat([values_T[:0], *(found[i] for i in own)])


def _by_trajectory(values_T: Tensor, indices: Sequence[int], lengths: Sequence[int]) -> dict[int, Tensor]:
    """Return views of the values of each trajectory by its index."""
    return dict(zip(indices, values_T.split([lengths[i] for i in indices]), strict=True))
