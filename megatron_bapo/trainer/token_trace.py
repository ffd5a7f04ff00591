"""What an update computes for every sampled token of chosen trajectories, gathered from the ranks that have the tokens.

Legend: N response tokens of a micro-batch on this rank; K those of them in the trace; A all tokens of the trace;
B chosen trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_bapo.algorithm.importance import clamped_log_ratio
from megatron_bapo.algorithm.policy_loss import ClippedTokens
from megatron_bapo.data.rollout_samples import DROPPED, DUAL, LOWER, REJECTED, UPPER
from megatron_bapo.parallel.collectives import broadcast_from_last_stage, sum_over
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.bound_scopes import Bounds
from megatron_bapo.trainer.micro_batches import Example, MicroBatch
from megatron_bapo.trainer.worker import Scores

COLUMNS = ("log_probs", "entropy", "ratio", "correction", "marks", "update", "clip_low", "clip_high")
"""Columns of the trace. The first five are figures of a token: its log-prob under the trainer's weights in nats, the
entropy of its distribution in nats, the ratio in the loss, the weight of the rollout correction, and its marks. The
others are those of the update that used it: its number in the step, starting at 1, and its clip bounds."""
GATHERED_TOKENS = 1 << 20
"""Tokens that one collective gathers, which bounds its memory to 32 MiB."""


@dataclass(frozen=True)
class TracedTrajectory:
    """Figures of the S sampled tokens of one trajectory; they are 0 if no update used it."""

    figures: dict[str, np.ndarray]
    """float32 [S] by the name of the column."""
    update: int
    """Number of the update in the step, starting at 1; 0: no update used the trajectory."""
    clip_low: float
    clip_high: float


@dataclass
class TokenTrace:
    """Figures of chosen trajectories in the first update of a step that trains on them.

    Later passes over the batch (`trainer.ppo_epochs`) are not traced. The figures stay on the devices until they are
    gathered, 40 bytes a token. They are copied from what the update computes anyway.
    """

    starts: dict[int, int]
    """Place of the first token of each chosen trajectory, by its index in the batch."""
    num_tokens: int
    _update: int = 0
    _marked: set[int] = field(default_factory=set)
    _parts: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(trajectories: Sequence[Trajectory], chosen: Sequence[int]) -> TokenTrace:
        """Return an empty trace of the trajectories with the indices `chosen`."""
        ends = np.cumsum([0, *(trajectories[i].num_sampled for i in chosen)]).tolist()
        return TokenTrace(dict(zip(chosen, ends[:-1], strict=True)), ends[-1])

    def mark(self, examples: Sequence[Example], indices: Sequence[int]) -> list[Example]:
        """Begin an update on the examples with these indices in the batch; mark those that are traced in it."""
        self._update += 1
        new = self.starts.keys() - self._marked
        self._marked.update(indices)
        return [
            replace(example, traced_at=self.starts[index]) if index in new else example
            for example, index in zip(examples, indices, strict=True)
        ]

    @torch.no_grad()
    def add(self, micro_batch: MicroBatch, scores: Scores, clipped: ClippedTokens, bounds: Bounds) -> None:
        """Store the marked tokens of a micro-batch; a repeated pass replaces those of the first one."""
        assert micro_batch.traced_at_N is not None, "the micro-batch has marked tokens"
        (own_K,) = torch.nonzero(micro_batch.traced_at_N >= 0, as_tuple=True)
        correction_N = micro_batch.corrections_N
        plain_N = clamped_log_ratio(scores.log_probs_N - micro_batch.behaviour_log_probs_N).exp()
        rejected_N = correction_N == 0
        marks_N = UPPER * clipped.high_T.int() + LOWER * clipped.low_T.int() + DUAL * clipped.dual_T.int()
        marks_N += torch.where(clipped.usable_T, 0, torch.where(rejected_N, REJECTED, DROPPED))
        columns = [
            *(scores.log_probs_N, scores.entropy_N, torch.where(clipped.usable_T, clipped.ratio_T, plain_N)),
            *(correction_N, marks_N),
        ]
        whole = [torch.full_like(plain_N, self._update), *(bound.expand_as(plain_N) for bound in bounds)]
        values = torch.stack([column.float()[own_K] for column in (*columns, *whole)])
        self._parts[self._update, id(micro_batch)] = micro_batch.traced_at_N[own_K], values

    def gather(self, groups: ParallelGroups) -> dict[int, TracedTrajectory]:
        """Return the traced trajectories by their index in the batch, on every rank. Collective.

        Every token is on one data- and context-parallel rank of the last pipeline stage, so a sum gathers it.
        """
        places_A = torch.cat(
            [torch.zeros(0, dtype=torch.int64, device=local_device()), *(p for p, _ in self._parts.values())]
        )
        values = torch.cat(
            [torch.zeros(len(COLUMNS), 0, device=local_device()), *(v for _, v in self._parts.values())], 1
        )
        found = np.empty((len(COLUMNS), self.num_tokens), np.float32)
        for start in range(0, self.num_tokens, GATHERED_TOKENS):
            part = found[:, start : start + GATHERED_TOKENS]
            table = torch.zeros(part.shape, device=local_device())
            own = (places_A >= start) & (places_A < start + part.shape[1])
            table[:, places_A[own] - start] = values[:, own]
            sum_over(groups.data_context)(table)
            part[:] = broadcast_from_last_stage(table, groups).cpu().numpy()
        ends = [*list(self.starts.values())[1:], self.num_tokens]
        return {
            index: _trajectory(found[:, start:end])
            for (index, start), end in zip(self.starts.items(), ends, strict=True)
        }


def _trajectory(columns: np.ndarray) -> TracedTrajectory:
    *figures, update, low, high = columns
    return TracedTrajectory(dict(zip(COLUMNS, figures, strict=False)), int(update[0]), float(low[0]), float(high[0]))
