"""Convert trajectories in flight to their checkpoint records and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import DTypeLike

from megatron_bapo.records import UnfinishedGroup, UnfinishedTrajectory
from megatron_bapo.rollout.generation import extend_by_outputs
from megatron_bapo.rollout.in_flight_group import InFlightGroup, PartialTrajectory, Reply, joined_parts
from megatron_bapo.rollout.messages import Completion, Generated


class UnfinishedGroups(Sequence[UnfinishedGroup]):
    """The checkpoint records of the groups that are in flight at one instant.

    Taking them costs microseconds per trajectory, because their tokens are not copied. A record is made, and its tokens
    are joined, when it is read, which another thread may do.
    """

    def __init__(self, groups: Iterable[InFlightGroup], partial_outputs: Mapping[str, Generated]) -> None:
        """`partial_outputs` are those of the groups' requests in flight, by request id."""
        self._groups = [replace(group, trajectories=[t.copy() for t in group.trajectories]) for group in groups]
        self._outputs = {request_id.rpartition("#")[0]: output for request_id, output in partial_outputs.items()}

    def __len__(self) -> int:
        return len(self._groups)

    @overload
    def __getitem__(self, index: int) -> UnfinishedGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[UnfinishedGroup]: ...
    def __getitem__(self, index: int | slice) -> UnfinishedGroup | Sequence[UnfinishedGroup]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        group = self._groups[index]
        extended = replace(group, trajectories=[trajectory.copy() for trajectory in group.trajectories])
        extend_by_outputs(extended, self._outputs)
        trajectories = tuple(_saved(trajectory) for trajectory in extended.trajectories)
        return UnfinishedGroup(group.prompt_serial, group.prompt.prompt.prompt_id, trajectories)


def restored_trajectory(saved: UnfinishedTrajectory) -> PartialTrajectory:
    """Return the trajectory of a checkpoint record; consecutive segments without a reply between them become one."""
    trajectory = PartialTrajectory(
        spans=[*saved.version_spans],
        turns=[*saved.turns],
        turn_ended=saved.turn_ended,
        finish_reason=saved.finish_reason,
        routes=[] if saved.routes is None else [saved.routes],
        kept_tokens=[] if saved.kept_tokens is None else [saved.kept_tokens],
    )
    num = len(saved.response_token_ids)
    mask = np.ones(num, bool) if saved.loss_mask is None else saved.loss_mask
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1), num] if num else []
    num_sampled = np.concatenate([[0], np.cumsum(mask)])
    replies = (turn for turn in saved.turns if turn["role"] != "assistant")
    for start, end in pairwise(bounds):
        token_ids = saved.response_token_ids[start:end]
        if mask[start]:
            log_probs = saved.behaviour_log_probs[num_sampled[start] : num_sampled[end]]
            trajectory.append(Completion(token_ids, log_probs, "abort", ""))
        else:
            trajectory.append(Reply(next(replies), token_ids))
    return trajectory


def _saved(trajectory: PartialTrajectory) -> UnfinishedTrajectory:
    return UnfinishedTrajectory(
        response_token_ids=_joined([segment.token_ids for segment in trajectory.segments], np.int32),
        behaviour_log_probs=_joined([segment.log_probs for segment in trajectory.sampled], np.float32),
        version_spans=tuple(trajectory.spans),
        finish_reason=trajectory.finish_reason,
        loss_mask=trajectory.loss_mask,
        turns=tuple(trajectory.turns),
        turn_ended=trajectory.turn_ended,
        routes=joined_parts(trajectory.routes),
        kept_tokens=joined_parts(trajectory.kept_tokens),
    )


def _joined(arrays: Sequence[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """Return the arrays one after another; a single one is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.zeros(0, dtype), *arrays])
