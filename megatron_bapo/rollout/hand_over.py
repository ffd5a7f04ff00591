"""What a rollout batch leaves behind on its way to the trainer: most texts, and the memory that it takes.

A text takes half as much memory as the tokens and log-probs, and nobody reads it once it is scored, except for a few
samples. So it is dropped, and decoded again where it is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rollout.in_flight_group import Decode

PART_BYTES = 1 << 24
"""Size of a part of a batch; copying it takes some milliseconds."""
TRAJECTORY_BYTES = 1 << 14
"""Bytes that a trajectory counts as besides its tokens and log-probs: pickling it takes as long as copying so many."""
_NO_TOKENS, _NO_LOG_PROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class ResponseTexts:
    """Drops and restores the texts of responses."""

    def __init__(self, decode: Decode, *, num_samples: int, keep_all: bool) -> None:
        """The first response to each of a batch's first `num_samples` prompts needs its text, or every response."""
        self._decode = decode
        self._num_samples = num_samples
        self._keep_all = keep_all

    def dropped(self, group: Group) -> Group:
        """Return a scored group without texts, or as it is if all are needed."""
        if self._keep_all:
            return group
        return Group(group.prompt, tuple(replace(trajectory, text="") for trajectory in group.trajectories))

    async def restored(self, groups: Sequence[Group], start: int) -> list[Group]:
        """Return groups of a batch with the texts that are needed; `start` is the index of the first one."""
        return [*await asyncio.gather(*(self._restored(group, start + i) for i, group in enumerate(groups)))]

    async def _restored(self, group: Group, index: int) -> Group:
        num = len(group.trajectories) if self._keep_all else int(index < self._num_samples)
        restored = await asyncio.gather(*map(self._with_text, group.trajectories[:num]))
        return Group(group.prompt, (*restored, *group.trajectories[num:]))

    async def _with_text(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.text:
            return trajectory
        return replace(trajectory, text=await self._decode(trajectory.response_token_ids))


def without_contents(group: Group) -> Group:
    """Return a scored group with only what the metrics of held-out prompts need: rewards and the turns' roles."""
    kept = (
        replace(
            trajectory,
            prompt_token_ids=_NO_TOKENS,
            response_token_ids=_NO_TOKENS,
            behaviour_log_probs=_NO_LOG_PROBS,
            version_spans=(),
            text="",
            answer=None,
            loss_mask=None,
            turns=tuple({"role": turn["role"]} for turn in trajectory.turns),
        )
        for trajectory in group.trajectories
    )
    return Group(group.prompt, tuple(kept))


def taken_apart(groups: list[Group]) -> Iterator[tuple[int, list[Group]]]:
    """Yield parts of about `PART_BYTES`, each with the index of its first group, and remove them from the list."""
    start = 0
    groups.reverse()
    while groups:
        part, num_bytes = list[Group](), 0
        while groups and num_bytes < PART_BYTES:
            part.append(groups.pop())
            num_bytes += sum(trajectory.num_bytes + TRAJECTORY_BYTES for trajectory in part[-1].trajectories)
        yield start, part
        start += len(part)
