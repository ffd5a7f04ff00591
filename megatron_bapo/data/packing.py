"""Pack trajectories into micro-batches within a token budget, with balanced work and equal counts on all ranks.

A length is the number of tokens of one trajectory that enter the model. plan[rank][micro_batch] is a list of trajectory
indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_bapo.config.padding import PaddingRule, round_up
from megatron_bapo.errors import UserError

# Length at which attention costs as much as the linear layers: 6 x the hidden size, here 4096, in verl's estimate
# (verl/utils/seqlen_balancing.py, calculate_workload).
ATTENTION_LENGTH = 24576
# Busiest rank over mean: below BALANCED the search stops, above UNBALANCED it tries more micro-batches.
BALANCED, UNBALANCED = 1.01, 1.05

NO_PADDING = PaddingRule()

Plan = list[list[list[int]]]


def cost(length: int, attention_length: float = ATTENTION_LENGTH) -> float:
    """Return the work of one sequence, in tokens without context: linear layers are linear, attention is quadratic."""
    return length + length**2 / attention_length


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    num_ranks: int,
    *,
    rule: PaddingRule = NO_PADDING,
    num_multiple_of: int = 1,
    attention_length: float = ATTENTION_LENGTH,
) -> Plan:
    """Distribute trajectories of `lengths` tokens: result[rank][micro_batch] is a sorted list of their indices.

    Each trajectory is in exactly one micro-batch. No micro-batch, padded by `rule`, has more than `max_tokens` tokens
    over all its context-parallel ranks. All ranks have the same number of micro-batches, a multiple of
    `num_multiple_of`, as pipeline schedules and gradient reductions require. This number is the smallest that the
    search finds, or larger if that balances the ranks. The most expensive micro-batches come first. Micro-batches are
    empty only if there are fewer trajectories than micro-batches. Raises UserError if a trajectory exceeds the budget.
    """
    assert all(length > 0 for length in lengths), "a trajectory has at least one token"
    longest = max(lengths, default=1)
    if rule.allocated([longest]) > max_tokens:
        raise UserError(
            f"a trajectory enters the model with {longest} tokens, {rule.allocated([longest])} with padding, more "
            f"than the {max_tokens} of a micro-batch (trainer.max_tokens_per_gpu x parallel.context_parallel_size); "
            "raise trainer.max_tokens_per_gpu, or lower rollout.max_response_length"
        )
    sizes = np.array([round_up(length, rule.sequence_multiple) for length in lengths], np.int64)
    budget = max_tokens // rule.granularity * rule.granularity

    def search(num_micro_batches: int) -> _Found | None:
        return _search(sizes, budget, (num_ranks, num_micro_batches), rule.equal_lengths, attention_length)

    # Two trajectories that each need more than half of the budget cannot share a micro-batch.
    num_needed = max(1, -(-int(sizes.sum()) // budget), int(np.count_nonzero(2 * sizes > budget)))
    num_micro_batches = round_up(-(-num_needed // num_ranks), num_multiple_of)
    while (found := search(num_micro_batches)) is None:
        num_micro_batches += num_multiple_of
    while found.busiest > UNBALANCED * found.mean and (num_micro_batches + num_multiple_of) * num_ranks <= len(lengths):
        num_micro_batches += num_multiple_of
        more = search(num_micro_batches)
        if more is None or more.busiest * BALANCED > found.busiest:
            break
        found = more
    heavy_first = np.argsort(-found.costs, axis=1, kind="stable").tolist()
    return [[sorted(rank[m]) for m in order] for rank, order in zip(found.plan, heavy_first, strict=True)]


@dataclass(frozen=True)
class _Found:
    plan: Plan
    costs: np.ndarray
    """Cost of each rank's micro-batches, [ranks, micro-batches]."""

    @property
    def busiest(self) -> float:
        return self.costs.sum(axis=1).max()

    @property
    def mean(self) -> float:
        return self.costs.sum(axis=1).mean()


def _search(
    sizes: np.ndarray, budget: int, shape: tuple[int, int], equal_lengths: bool, attention_length: float
) -> _Found | None:
    """Return the best balanced of several greedy fills of `shape` = (ranks, micro-batches per rank); None if all fail.

    The search tries micro-batches of equal cost before full ones, which waste the least space (and, with equal lengths,
    the least padding). If the budget is tight, ranks with long sequences have to take further tokens in the end;
    overweighting attention then balances the long sequences of the other ranks.
    """
    best = None
    for fullest in [True] if equal_lengths else [False, True]:
        for attention_weight in 1, 2, 4:
            found = _fill(sizes, budget, shape, equal_lengths, fullest, attention_length, attention_weight)
            if found is not None and (best is None or found.busiest < best.busiest):
                best = found
            if best is not None and best.busiest <= BALANCED * best.mean:
                return best
    return best


def _fill(
    sizes: np.ndarray,
    budget: int,
    shape: tuple[int, int],
    equal_lengths: bool,
    fullest: bool,
    attention_length: float,
    attention_weight: float,
) -> _Found | None:
    """Assign trajectories, longest first, to the rank with room that has the least work; None if one fits nowhere.

    Among the rank's micro-batches with room, choose the one with the least work or, if `fullest`, the fullest.
    """
    tokens, longest, squares = (np.zeros(shape, np.int64) for _ in range(3))
    plan: Plan = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
    for num_placed, index in enumerate(np.argsort(-sizes, kind="stable").tolist()):
        added = np.maximum(longest, sizes[index]) if equal_lengths else np.full(shape, sizes[index])
        has_room = tokens + added <= budget
        if len(sizes) - num_placed <= np.count_nonzero(tokens == 0):
            has_room &= tokens == 0
        work = tokens + attention_weight / attention_length * squares
        rank = int(np.argmin(np.where(has_room.any(axis=1), work.sum(axis=1), np.inf)))
        place = rank, int(np.argmin(np.where(has_room[rank], -tokens[rank] if fullest else work[rank], np.inf)))
        if not has_room[place]:
            return None
        tokens[place] += added[place]
        squares[place] += added[place] ** 2
        longest[place] = added[place]
        plan[place[0]][place[1]].append(index)
    return _Found(plan, tokens + squares / attention_length)
