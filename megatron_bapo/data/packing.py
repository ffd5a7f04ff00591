"""Packed micro-batches: token budget kept, ranks balanced, the same number of micro-batches on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_bapo.errors import UserError

# The length at which attention costs as much as the matrix products, at a hidden size of 4096; verl balances with the
# same constant (verl/utils/seqlen_balancing.py, calculate_workload).
ATTENTION_LENGTH = 24576


def cost(length: int) -> float:
    """Work of one trajectory, in tokens of negligible context: matrix products are linear, attention is quadratic."""
    return length + length**2 / ATTENTION_LENGTH


def pack(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Distribute trajectories of `lengths` tokens: result[rank][micro_batch] is a sorted list of their indices.

    Every trajectory stands once, and no micro-batch is empty or longer than `max_tokens`. All ranks have equally many
    micro-batches, as pipeline schedules and gradient reductions need; they are as few as the greedy search finds, the
    heavy ones first. Raises UserError when a trajectory exceeds the budget or there is no such distribution.
    """
    assert all(length > 0 for length in lengths), "a trajectory has at least one token"
    if lengths and max(lengths) > max_tokens:
        raise UserError(
            f"a trajectory has {max(lengths)} tokens (prompt and response), more than trainer.max_tokens_per_gpu="
            f"{max_tokens}; raise max_tokens_per_gpu to at least {max(lengths)}, or lower rollout.max_response_length"
        )
    if len(lengths) < num_ranks:
        raise UserError(
            f"{len(lengths)} trajectories cannot be spread over {num_ranks} data-parallel ranks; "
            f"raise trainer.ppo_mini_batch_size to a multiple of {num_ranks}"
        )
    fewest = -(-sum(lengths) // (max_tokens * num_ranks))
    for num_micro_batches in range(fewest, len(lengths) // num_ranks + 1):
        micro_batches = _fill(lengths, max_tokens, num_micro_batches * num_ranks)
        if micro_batches is not None:
            return _spread(micro_batches, lengths, num_ranks)
    raise UserError(
        f"{len(lengths)} trajectories with {sum(lengths)} tokens do not fit into equally many micro-batches of at most "
        f"trainer.max_tokens_per_gpu={max_tokens} tokens on {num_ranks} data-parallel ranks; raise max_tokens_per_gpu, "
        f"or make trainer.ppo_mini_batch_size a multiple of {num_ranks}"
    )


def _fill(lengths: Sequence[int], max_tokens: int, num_micro_batches: int) -> list[list[int]] | None:
    """Longest trajectory first, each into the cheapest micro-batch that has room; None when one finds no room."""
    costs = np.zeros(num_micro_batches)
    room = np.full(num_micro_batches, max_tokens)
    micro_batches: list[list[int]] = [[] for _ in range(num_micro_batches)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        chosen = int(np.argmin(np.where(room >= lengths[index], costs, np.inf)))
        if room[chosen] < lengths[index]:
            return None
        costs[chosen] += cost(lengths[index])
        room[chosen] -= lengths[index]
        micro_batches[chosen].append(index)
    return micro_batches


def _spread(micro_batches: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Deal micro-batches out in rounds of falling cost, the heaviest of a round to the rank with the least so far."""

    def total_cost(indices: list[int]) -> float:
        return sum(cost(lengths[index]) for index in indices)

    ordered = sorted((sorted(micro_batch) for micro_batch in micro_batches), key=lambda m: (-total_cost(m), m))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = np.zeros(num_ranks)
    for start in range(0, len(ordered), num_ranks):
        lightest_first = np.argsort(loads, kind="stable")
        for rank, micro_batch in zip(lightest_first, ordered[start : start + num_ranks], strict=True):
            ranks[rank].append(micro_batch)
            loads[rank] += total_cost(micro_batch)
    return ranks
