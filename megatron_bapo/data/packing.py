"""Pack trajectories into micro-batches within a token budget, with balanced work and equal counts on all ranks.

A length is the number of tokens of one trajectory that enter the model. plan[rank][micro_batch] is a list of trajectory
indices. Trajectories of a group may share the tokens of their prompt; they are then distributed in parts of groups.
"""

from __future__ import annotations

import math
from collections import Counter
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


@dataclass(frozen=True)
class Sharing:
    """Tokens that trajectories of a group share if they are in one micro-batch."""

    groups: Sequence[int | None]
    """Group of each trajectory; None: it is in none."""
    num_shared: Sequence[int]
    """Number of tokens of each trajectory that its whole group has."""
    repeated: float = 0.0
    """Share of a token's memory that a shared token takes again for each further trajectory: attention repeats it."""


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    num_ranks: int,
    *,
    sharing: Sharing | None = None,
    rule: PaddingRule = NO_PADDING,
    num_multiple_of: int = 1,
    attention_length: float = ATTENTION_LENGTH,
) -> Plan:
    """Distribute trajectories of `lengths` tokens: result[rank][micro_batch] is a sorted list of their indices.

    Each trajectory is in exactly one micro-batch. No micro-batch, padded by `rule`, has more than `max_tokens` tokens
    over all its context-parallel ranks, or takes more memory than so many without sharing. All ranks have the same
    number of micro-batches, a multiple of `num_multiple_of`, as pipeline schedules and gradient reductions require.
    This number is the smallest that the search finds, or larger if that balances the ranks. The most expensive
    micro-batches come first. Micro-batches are empty only if there are fewer trajectories than micro-batches. Raises
    UserError if a trajectory exceeds the budget.

    With `sharing`, which excludes padding of single sequences, whole groups compute the fewest tokens but may leave the
    ranks with unequal work. Halves, quarters and smaller parts of them are therefore tried, too, until the ranks are
    balanced; the plan with the least work of the busiest rank is returned.
    """
    assert all(length > 0 for length in lengths), "a trajectory has at least one token"
    longest = max(lengths, default=1)
    if rule.allocated([longest]) > max_tokens:
        raise UserError(
            f"a trajectory enters the model with {longest} tokens, {rule.allocated([longest])} with padding, more "
            f"than the {max_tokens} of a micro-batch (trainer.max_tokens_per_gpu x parallel.context_parallel_size); "
            "raise trainer.max_tokens_per_gpu, or lower rollout.max_response_length"
        )
    budget = max_tokens // rule.granularity * rule.granularity
    padded = [round_up(length, rule.sequence_multiple) for length in lengths]
    sharing = sharing or Sharing([None] * len(lengths), [0] * len(lengths))
    grouped = Counter(group for group in sharing.groups if group is not None)
    most, best = max(grouped.values(), default=1), None
    while True:
        items = _Items.of(padded, sharing, most, budget, attention_length, equal_lengths=rule.equal_lengths)
        found = _distribute(items, num_ranks, num_multiple_of)
        if best is None or found.busiest < best[0].busiest:
            best = found, items
        if most == 1 or best[0].is_balanced:
            return best[0].plan_of(best[1])
        most = -(-most // 2)


@dataclass(frozen=True)
class _Items:
    """What is distributed: trajectories or, if they share tokens, parts of their groups."""

    members: list[list[int]]
    """Trajectories of each item."""
    sizes: np.ndarray
    """Tokens that are computed."""
    rooms: np.ndarray
    """Tokens of the budget that each item takes: its own, and a part of those that attention repeats."""
    squares: np.ndarray
    """Sum of the squared lengths, to which the work of attention is proportional."""
    budget: int
    """Tokens of a micro-batch."""
    attention_length: float
    equal_lengths: bool
    """Whether the items of a micro-batch are padded to the longest."""

    @staticmethod
    def of(
        lengths: Sequence[int],
        sharing: Sharing,
        most: int,
        budget: int,
        attention_length: float,
        *,
        equal_lengths: bool,
    ) -> _Items:
        """Split each group into parts of at most `most` trajectories that fit into a micro-batch."""
        members, sizes, rooms, filling = list[list[int]](), list[int](), list[int](), dict[int, int]()
        for index, (group, num_shared) in enumerate(zip(sharing.groups, sharing.num_shared, strict=True)):
            item, own = None if group is None else filling.get(group), lengths[index] - num_shared
            more = own + math.ceil(sharing.repeated * num_shared)
            if item is None or len(members[item]) == most or rooms[item] + more > budget:
                item, more = len(members), own
                members.append([])
                sizes.append(num_shared)
                rooms.append(num_shared)
            if group is not None:
                filling[group] = item
            members[item].append(index)
            sizes[item] += own
            rooms[item] += more
        squares = [sum(lengths[index] ** 2 for index in item) for item in members]
        columns = np.array([sizes, rooms, squares], np.int64)
        return _Items(members, columns[0], columns[1], columns[2], budget, attention_length, equal_lengths)


def _distribute(items: _Items, num_ranks: int, num_multiple_of: int) -> _Found:
    """Return the plan with the fewest micro-batches that the search finds, or with more that balance the ranks."""
    rooms, budget = items.rooms, items.budget

    def search(num_micro_batches: int) -> _Found | None:
        return _search(items, (num_ranks, num_micro_batches))

    # Two trajectories that each need more than half of the budget cannot share a micro-batch.
    num_needed = max(1, -(-int(rooms.sum()) // budget), int(np.count_nonzero(2 * rooms > budget)))
    num_micro_batches = round_up(-(-num_needed // num_ranks), num_multiple_of)
    while (found := search(num_micro_batches)) is None:
        num_micro_batches += num_multiple_of
    while found.busiest > UNBALANCED * found.mean and (num_micro_batches + num_multiple_of) * num_ranks <= len(rooms):
        num_micro_batches += num_multiple_of
        more = search(num_micro_batches)
        if more is None or more.busiest * BALANCED > found.busiest:
            break
        found = more
    return found


@dataclass(frozen=True)
class _Found:
    plan: Plan
    """Indices of items."""
    costs: np.ndarray
    """Cost of each rank's micro-batches, [ranks, micro-batches]."""

    @property
    def busiest(self) -> float:
        return self.costs.sum(axis=1).max()

    @property
    def mean(self) -> float:
        return self.costs.sum(axis=1).mean()

    @property
    def is_balanced(self) -> bool:
        return self.busiest <= BALANCED * self.mean

    def plan_of(self, items: _Items) -> Plan:
        """Return the plan in trajectories, sorted, the most expensive micro-batches first."""
        heavy_first = np.argsort(-self.costs, axis=1, kind="stable").tolist()
        return [
            [sorted(index for item in rank[m] for index in items.members[item]) for m in order]
            for rank, order in zip(self.plan, heavy_first, strict=True)
        ]


def _search(items: _Items, shape: tuple[int, int]) -> _Found | None:
    """Return the best balanced of several greedy fills of `shape` = (ranks, micro-batches per rank); None if all fail.

    The search tries micro-batches of equal cost before full ones, which waste the least space (and, with equal lengths,
    the least padding). If the budget is tight, ranks with long sequences have to take further tokens in the end;
    overweighting attention then balances the long sequences of the other ranks.
    """
    best = None
    for fullest in [True] if items.equal_lengths else [False, True]:
        for attention_weight in 1, 2, 4:
            found = _fill(items, shape, fullest, attention_weight)
            if found is not None and (best is None or found.busiest < best.busiest):
                best = found
            if best is not None and best.is_balanced:
                return best
    return best


def _fill(items: _Items, shape: tuple[int, int], fullest: bool, attention_weight: float) -> _Found | None:
    """Assign items, largest first, to the rank with room that has the least work; None if one fits nowhere.

    Among the rank's micro-batches with room, choose the one with the least work or, if `fullest`, the fullest.
    """
    sizes, equal_lengths, attention_length = items.sizes, items.equal_lengths, items.attention_length
    tokens, taken, longest, squares = (np.zeros(shape, np.int64) for _ in range(4))
    plan: Plan = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
    for num_placed, index in enumerate(np.argsort(-items.rooms, kind="stable").tolist()):
        added = np.maximum(longest, sizes[index]) if equal_lengths else np.full(shape, sizes[index])
        taking = added if equal_lengths else np.full(shape, items.rooms[index])
        has_room = taken + taking <= items.budget
        if len(sizes) - num_placed <= np.count_nonzero(tokens == 0):
            has_room &= tokens == 0
        work = tokens + attention_weight / attention_length * squares
        rank = int(np.argmin(np.where(has_room.any(axis=1), work.sum(axis=1), np.inf)))
        place = rank, int(np.argmin(np.where(has_room[rank], -taken[rank] if fullest else work[rank], np.inf)))
        if not has_room[place]:
            return None
        tokens[place] += added[place]
        taken[place] += taking[place]
        squares[place] += added[place] ** 2 if equal_lengths else items.squares[index]
        longest[place] = added[place]
        plan[place[0]][place[1]].append(index)
    return _Found(plan, tokens + squares / attention_length)
