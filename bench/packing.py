"""Micro-batch packing against other planners: share of real tokens, balance of the ranks, budget violations.

python -m bench.packing

Every planner gets the same sequences and the same micro-batch budget, 16384 tokens on each of two context-parallel
ranks, and pads as TP 2 x CP 2 with sequence parallelism and FP8 requires. The table shows the worst of all seeds: real
tokens over the micro-batches' budgets (at best: with the fewest micro-batches that hold the tokens) and over the
allocated tokens, which include all padding; the busiest rank's cost over the mean, for real tokens and by verl's cost;
and micro-batches over budget. The number of micro-batches per rank and the time are medians.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import chain
from statistics import median
from time import perf_counter

import numpy as np

from bench.report import option_parser, report
from megatron_bapo.config.padding import PaddingRule, padding_rule
from megatron_bapo.data.packing import Plan, cost, pack

BUDGET = 32768
RULE = padding_rule(2, 2, sequence_parallel=True, fp8_multiple=16, packing=True)
SETTINGS = ((8, 2048), (8, 512), (2, 512), (32, 2048))
"""(data-parallel ranks, trajectories per minibatch). The first has enough tokens to fill the budgets of all ranks."""
NUM_SEEDS = 7

Planner = Callable[[list[int], int, int], Plan]


def reasoning_lengths(num: int, seed: int) -> list[int]:
    """Return lengths of reasoning trajectories in tokens: log-normal, median 2048, clipped at 32768.

    The 99th percentile is ten times the median, as reported for reasoning RL in Laminar (arXiv 2510.12633).
    """
    sigma = np.log(10) / 2.3263  # 2.3263 is the 99th percentile of the standard normal
    lengths = np.random.default_rng(seed).lognormal(np.log(2048), sigma, num)
    return np.clip(np.rint(lengths), 1, 32768).astype(int).tolist()


def ours(lengths: list[int], budget: int, num_ranks: int) -> Plan:
    return pack(lengths, budget, num_ranks, rule=RULE)


def first_fit_decreasing(lengths: list[int], budget: int, num_ranks: int) -> Plan:
    """NeMo-RL's planner: first-fit-decreasing bins of the whole minibatch, filled up to a multiple of the ranks.

    Bins are assigned to the ranks in turn. Source: nemo_rl/data/packing/algorithms.py (FirstFitDecreasingPacker,
    _adjust_bin_count) and nemo_rl/distributed/batched_data_dict.py (shard_by_batch_size).
    """
    sizes = [RULE.padded_lengths([length])[0] for length in lengths]
    bins: list[list[int]] = []
    room: list[int] = []
    for size, index in sorted(((size, index) for index, size in enumerate(sizes)), reverse=True):
        chosen = next((b for b, left in enumerate(room) if left >= size), None)
        if chosen is None:
            bins.append([])
            room.append(budget)
            chosen = -1
        bins[chosen].append(index)
        room[chosen] -= size
    missing = -len(bins) % num_ranks
    by_number = iter(sorted(range(len(bins)), key=lambda b: (len(bins[b]), b), reverse=True))
    source = next(by_number)
    for _ in range(missing):
        while len(bins[source]) == 1:
            source = next(by_number)
        bins.append([bins[source].pop()])
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def karmarkar_karp(values: list[float], num_parts: int, *, equal_number: bool) -> list[list[int]]:
    """Partition the indices into parts with nearly equal sums of values (largest differencing, as verl does)."""
    order = sorted(range(len(values)), key=lambda index: (values[index], index))
    step = num_parts if equal_number else 1
    heap = []
    for start in range(0, len(order), step):
        parts = [(values[index], [index]) for index in reversed(order[start : start + step])]
        parts += [(0.0, []) for _ in range(num_parts - len(parts))]
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], start, parts))
    while len(heap) > 1:
        _, key, widest = heapq.heappop(heap)
        _, _, next_widest = heapq.heappop(heap)
        merged = [(a + b, i + j) for (a, i), (b, j) in zip(widest, reversed(next_widest), strict=True)]
        merged.sort(reverse=True)
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], key, merged))
    return [indices for _, indices in heap[0][2]]


def verl(lengths: list[int], budget: int, num_ranks: int) -> Plan:
    """verl's planner: Karmarkar-Karp by cost over ranks, with equal numbers of sequences, then over micro-batches.

    The number of micro-batches follows from the fullest rank's tokens; the budget of each is not checked. Source:
    verl/trainer/ppo/ray_trainer.py (_balance_batch) and verl/utils/seqlen_balancing.py (rearrange_micro_batches).
    """
    return _karmarkar_karp_plan(lengths, budget, num_ranks, keep_budget=False)


def verl_within_budget(lengths: list[int], budget: int, num_ranks: int) -> Plan:
    """verl's planner with more micro-batches, until all are within the budget."""
    return _karmarkar_karp_plan(lengths, budget, num_ranks, keep_budget=True)


def _karmarkar_karp_plan(lengths: list[int], budget: int, num_ranks: int, *, keep_budget: bool) -> Plan:
    ranks = karmarkar_karp([cost(length) for length in lengths], num_ranks, equal_number=True)
    num_micro_batches = max(-(-_allocated(lengths, rank) // budget) for rank in ranks)
    while True:
        plan = [
            [[rank[i] for i in part] for part in karmarkar_karp(costs, num_micro_batches, equal_number=False)]
            for rank in ranks
            for costs in [[cost(lengths[i]) for i in rank]]
        ]
        if not keep_budget or all(_allocated(lengths, part) <= budget for part in chain(*plan)):
            return plan
        num_micro_batches += 1


def _allocated(lengths: list[int], indices: list[int], rule: PaddingRule = RULE) -> int:
    return rule.allocated([lengths[i] for i in indices])


def figures_of(plan: Plan, lengths: list[int], budget: int) -> dict[str, float]:
    """Return the figures of one plan. Allocated tokens and budget violations include padding, the others do not."""
    micro_batches = list(chain(*plan))
    assert sorted(chain(*micro_batches)) == list(range(len(lengths))), "every trajectory must be packed once"
    assert len({len(rank) for rank in plan}) == 1, "all ranks need the same number of micro-batches"
    allocated = [_allocated(lengths, indices) for indices in micro_batches]
    costs = [sum(cost(lengths[i]) for i in chain(*rank)) for rank in plan]
    num_tokens, capacity = sum(lengths), budget * len(plan)
    return {
        "micro_batches": len(plan[0]),
        "real_of_budget": num_tokens / (len(plan[0]) * capacity),
        "real_at_best": num_tokens / (-(-num_tokens // capacity) * capacity),
        "real_of_allocated": num_tokens / sum(allocated),
        "busiest_of_mean": max(costs) / (sum(costs) / len(costs)),
        "over_budget": sum(tokens > budget for tokens in allocated) / len(allocated),
    }


PLANNERS: dict[str, tuple[str, Planner]] = {
    "ours": ("ours", ours),
    "first_fit_decreasing": ("FFD (NeMo-RL)", first_fit_decreasing),
    "karmarkar_karp": ("KK (verl)", verl),
    "karmarkar_karp_kept": ("KK, budget kept", verl_within_budget),
}
COLUMNS = ("ranks", "batch", "planner", "m-b/rank", "real/budget", "at best", "real/alloc", "busiest", "over", "ms")


def measure(num_ranks: int, num: int) -> dict[str, dict[str, float]]:
    """Return each planner's figures over all seeds: medians of number and time, the worst of all others."""
    runs: dict[str, list[dict[str, float]]] = {key: [] for key in PLANNERS}
    for seed in range(NUM_SEEDS):
        lengths = reasoning_lengths(num, seed)
        for key, (_, planner) in PLANNERS.items():
            start = perf_counter()
            plan = planner(lengths, BUDGET, num_ranks)
            elapsed_ms = 1000 * (perf_counter() - start)
            runs[key].append(figures_of(plan, lengths, BUDGET) | {"ms": elapsed_ms})
    summaries = {"micro_batches": median, "ms": median, "busiest_of_mean": max, "over_budget": max}
    return {
        key: {name: float(summaries.get(name, min)(run[name] for run in results)) for name in results[0]}
        for key, results in runs.items()
    }


def main() -> None:
    rows, ratios, figures = [], {}, {}
    for num_ranks, num in SETTINGS:
        for key, found in measure(num_ranks, num).items():
            name = PLANNERS[key][0]
            shares = [f"{found[k]:.1%}" for k in ("real_of_budget", "real_at_best", "real_of_allocated")]
            busiest, over = f"{found['busiest_of_mean']:.3f}", f"{found['over_budget']:.0%}"
            rows.append((num_ranks, num, name, found["micro_batches"], *shares, busiest, over, found["ms"]))
            setting = f"{key}_{num_ranks}x{num}"
            for k in ("real_of_budget", "real_of_allocated", "busiest_of_mean", "over_budget"):
                ratios[f"{setting}_{k}"] = round(found[k], 4)
            figures[f"{setting}_ms"] = round(found["ms"], 2)
    report("packing", COLUMNS, rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
