"""Values of trajectories that only some ranks can compute, because only these have the tokens.

Legend: B trajectories of the batch; K values of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_bapo.parallel.collectives import max_over, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.records import Trajectory


def indices_with_tokens(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the indices of the trajectories that have more than the placeholders of `batch_header.py`."""
    return [i for i, trajectory in enumerate(trajectories) if trajectory.response_token_ids.strides != (0,)]


def on_every_rank(own_K: Tensor, own: Sequence[int], num: int, groups: ParallelGroups) -> Tensor:
    """Return the values of all `num` trajectories, float64 [B, K], on every rank, unchanged to the last bit.

    `own_K` has those of the trajectories `own`. If several replicas have one, the values are the first one's. The
    ranks of a replica have the same. Collective.
    """
    data, device = groups.data, local_device()
    # The largest of these numbers is the first replica's; the others have 0.
    claims_B = torch.zeros(num, dtype=torch.float64, device=device)
    claims_B[own] = float(data.size - data.rank)
    first_B = claims_B.clone()
    max_over(data)(first_B)
    values_BK = torch.zeros(num, own_K.shape[1], dtype=torch.float64, device=device)
    values_BK[own] = own_K.double().to(device)
    values_BK[claims_B != first_B] = 0.0
    sum_over(data)(values_BK)
    return values_BK.cpu()
