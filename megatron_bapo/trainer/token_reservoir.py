"""Random sample of the tokens of every update, for the paper's Figures 5 and 10 (arXiv 2510.18927).

Legend: N sampled tokens of a micro-batch on this rank; K those of them in the reservoir.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_bapo.metrics.token_table import COLUMNS, TokenTable
from megatron_bapo.parallel.collectives import broadcast_object_from_last_stage, gather_objects
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.micro_batches import Example, MicroBatch


@dataclass
class TokenReservoir:
    """Chosen tokens of the updates of one step; they stay on the devices until they are gathered.

    Tokens are chosen from the whole minibatch before it is split, so the choice depends on the seed, not on the layout.
    """

    num_tokens: int
    """Number of tokens per update."""
    seed: tuple[int, ...]
    _update: int = 0
    _chosen: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def choose(self, examples: Sequence[Example]) -> list[Example]:
        """Begin an update and return its examples with the chosen tokens marked."""
        self._update += 1
        starts = np.cumsum([0, *(e.trajectory.num_sampled for e in examples)])
        rng = np.random.default_rng((*self.seed, self._update))
        chosen = np.sort(rng.choice(starts[-1], min(self.num_tokens, starts[-1]), replace=False))
        edges = np.searchsorted(chosen, starts)
        return [
            replace(example, recorded=tuple((chosen[first:last] - start).tolist()))
            for example, start, first, last in zip(examples, starts[:-1], edges[:-1], edges[1:], strict=True)
        ]

    def add(self, micro_batch: MicroBatch, log_probs_N: torch.Tensor, entropy_N: torch.Tensor) -> None:
        """Store the chosen tokens of a micro-batch; a repeated pass replaces those of the first one."""
        columns = (log_probs_N - micro_batch.behaviour_log_probs_N, log_probs_N.exp(), entropy_N)
        values = torch.stack([*columns, micro_batch.advantages_N.sign()])[:, micro_batch.recorded_K]
        update_K = torch.full_like(values[:1], self._update)
        self._chosen[self._update, id(micro_batch)] = torch.cat([update_K, values])

    def gather(self, groups: ParallelGroups) -> TokenTable:
        """Return the tokens of all ranks on every rank, in an order that does not depend on the layout."""
        table = None
        if groups.is_last_stage:
            own = [part.cpu().numpy() for part in self._chosen.values()]
            parts = gather_objects(own, groups.data_context)
            rows = np.concatenate([np.zeros((len(COLUMNS), 0), np.float32), *(x for part in parts for x in part)], 1)
            table = dict(zip(COLUMNS, rows[:, np.lexsort(rows[::-1])], strict=True))
        return broadcast_object_from_last_stage(table, groups)
