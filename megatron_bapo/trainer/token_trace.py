"""What an update computes for every sampled token of chosen trajectories, gathered from the ranks that have the tokens.

Legend: N response tokens of a micro-batch on this rank; K those of them in the trace; A this rank's tokens of the
trace; S sampled tokens of one trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_bapo.algorithm.importance import clamped_log_ratio
from megatron_bapo.algorithm.policy_loss import ClippedTokens
from megatron_bapo.data.rollout_samples import DROPPED, DUAL, LOWER, MASKED, REJECTED, UPPER
from megatron_bapo.parallel.collectives import sum_to_main
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.bound_scopes import Bounds
from megatron_bapo.trainer.micro_batches import Example, MicroBatch
from megatron_bapo.trainer.worker import Scores

FIGURES = ("log_probs", "entropy", "ratio", "ratio_log_probs", "correction", "marks")
"""Columns of a token: its log-prob under the trainer's weights in nats, the entropy of its distribution in nats, the
ratio in the loss and the log-prob in its denominator, the weight of the rollout correction, and its marks."""
NUM_COLUMNS = len(FIGURES) + 3
"""The other columns are those of the update that used the token: its number in the step, starting at 1, and its lower
and upper clip bound."""


@dataclass(frozen=True)
class TracedTrajectory:
    """Figures of the S sampled tokens of one trajectory; they are 0 if no update used it."""

    columns: np.ndarray
    """`FIGURES` and the columns of the update, float32 [`NUM_COLUMNS`, S]."""

    @property
    def figures(self) -> dict[str, np.ndarray]:
        """Return the figures of the tokens, [S] by the name of the column."""
        return dict(zip(FIGURES, self.columns, strict=False))

    @property
    def update(self) -> int:
        """Return the number of the update in the step, starting at 1; 0: no update used the trajectory."""
        return int(self.columns[len(FIGURES), 0])

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Return the lower and the upper clip bound of the update."""
        low, high = self.columns[-2:, 0].tolist()
        return low, high


@dataclass
class TokenTrace:
    """Figures of chosen trajectories in the first update of a step that trains on them.

    Later passes over the batch (`trainer.ppo_epochs`) are not traced. The figures stay on the devices until they are
    gathered, 44 bytes a token. They are copied from what the update computes anyway.
    """

    starts: dict[int, int]
    """Place of the first token of each chosen trajectory, by its index in the batch."""
    sizes: dict[int, int]
    """Number of sampled tokens of each."""
    _update: int = 0
    _marked: set[int] = field(default_factory=set)
    _parts: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(trajectories: Sequence[Trajectory], chosen: Sequence[int]) -> TokenTrace:
        """Return an empty trace of the trajectories with the indices `chosen`."""
        sizes = {index: trajectories[index].num_sampled for index in chosen}
        starts = np.cumsum([0, *sizes.values()]).tolist()
        return TokenTrace(dict(zip(sizes, starts, strict=False)), sizes)

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
    def add(
        self,
        micro_batch: MicroBatch,
        scores: Scores,
        clipped: ClippedTokens,
        bounds: Bounds,
        masked_N: torch.Tensor | None,
    ) -> None:
        """Store the marked tokens of a micro-batch; a repeated pass replaces those of the first one.

        `masked_N` says which tokens off-policy sequence masking leaves out of the objective; None: it is off.
        """
        correction_N = micro_batch.corrections_N
        plain_N = clamped_log_ratio(scores.log_probs_N - micro_batch.behaviour_log_probs_N).exp()
        rejected_N = correction_N == 0
        marks_N = UPPER * clipped.high_T.int() + LOWER * clipped.low_T.int() + DUAL * clipped.dual_T.int()
        marks_N += torch.where(clipped.usable_T, 0, torch.where(rejected_N, REJECTED, DROPPED))
        if masked_N is not None:
            marks_N += MASKED * masked_N.int()
        columns = [
            *(scores.log_probs_N, scores.entropy_N, torch.where(clipped.usable_T, clipped.ratio_T, plain_N)),
            *(micro_batch.behaviour_log_probs_N, correction_N, marks_N),
        ]
        whole = [torch.full_like(plain_N, self._update), *(bound.expand_as(plain_N) for bound in bounds)]
        values = torch.stack([column.float()[micro_batch.traced_K] for column in (*columns, *whole)])
        self._parts[self._update, id(micro_batch)] = micro_batch.traced_at_K, values

    def gather(self, index: int, groups: ParallelGroups) -> TracedTrajectory | None:
        """Return the trajectory with this index in the batch on the main rank, None on the others. Collective.

        Every token is on one data- and context-parallel rank of the last pipeline stage, so a sum gathers it.
        """
        start, size = self.starts[index], self.sizes[index]
        table = torch.zeros(NUM_COLUMNS, size, device=local_device())
        if self._parts:
            places_A, values = self._joined()
            own_A = (places_A >= start) & (places_A < start + size)
            table[:, places_A[own_A] - start] = values[:, own_A]
        sum_to_main(table, groups)
        return TracedTrajectory(table.cpu().numpy()) if groups.is_main else None

    def _joined(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places [A] and columns of this rank's tokens; joins the parts of micro-batches once."""
        if len(self._parts) > 1:
            places, values = zip(*self._parts.values(), strict=True)
            self._parts = {(0, 0): (torch.cat(places), torch.cat(values, 1))}
        ((places_A, values),) = self._parts.values()
        return places_A, values
