"""Search for the clip bounds against the released code's loop, on a million tokens of one rank.

The loop is a reimplementation of the authors' `policy_loss.py` (January 2026): float32, one evaluation over all tokens
for each pair of bounds, then an all-reduce of the two sums (here only counted) and a host read of their ratio, twice
where the code does so. Both versions take log-probs and advantages, search the paper's ranges with the lower bound
first, and must find the same bounds. In the best case the starting bounds satisfy the target, in the worst case no
bounds do. `spread` is the standard deviation of the log-ratios in nats: at 0.05 few tokens exceed a bound, at 1 most
do.

Times are those of one thread, medians of interleaved repeats; the ratios compare CPU time. With glibc's default malloc,
half of the loop's CPU time is system time, because its temporaries of 4 MB are mapped and cleared each time; the search
works in chunks whose memory is reused. If memory stays mapped (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ at
4e9), the loop takes half the time and the search the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter, thread_time

import torch
from torch import Tensor

from bench.report import option_parser, report
from megatron_bapo.algorithm.clip_bounds import ClipBounds, find_clip_bounds
from megatron_bapo.config.algorithm import ClipBoundsSettings

NUM_TOKENS = 1_000_000
SPREADS = (0.05, 0.3, 1.0)
TARGETS = {"best": 0.1, "worst": 0.9}
NUM_REPEATS = {"best": 15, "worst": 3}
EPSILON = 1e-8


class ReleasedLoop:
    """The released search. Counts its evaluations, each with an all-reduce, and its host reads of device values."""

    def __init__(self, settings: ClipBoundsSettings) -> None:
        self.settings = settings
        self.num_evaluations = self.num_host_reads = 0

    def read(self, value: Tensor) -> float:
        self.num_host_reads += 1
        return value.item()

    def evaluate(self, ratio_T: Tensor, advantages_T: Tensor, mask_T: Tensor, low: float, high: float) -> Tensor:
        """Return P / (N + 1e-8) as a 0-d tensor."""
        lowest, highest = ratio_T.new_tensor(low), ratio_T.new_tensor(high)
        raised_T, lowered_T = torch.maximum(ratio_T, lowest), torch.minimum(ratio_T, highest)
        contribution_T = torch.where(advantages_T >= 0, lowered_T, raised_T) * advantages_T * mask_T
        sums = torch.stack([contribution_T.clamp(min=0).sum(), (-contribution_T.clamp(max=0)).sum()])
        self.num_evaluations += 1
        positive, negative = sums
        self.num_host_reads += 1
        if torch.all(negative <= 0):
            return ratio_T.new_tensor(float("inf"))
        return positive / (negative + ratio_T.new_tensor(EPSILON))

    def __call__(
        self, current_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor, mask_T: Tensor
    ) -> tuple[float, float]:
        s = self.settings
        target = s.positive_contribution_target / (1 - s.positive_contribution_target)
        ratio_T = torch.exp(torch.clamp(current_T - behaviour_T, min=-20.0, max=20.0))
        evaluate = partial(self.evaluate, ratio_T, advantages_T, mask_T)
        low, high = s.ratio_lower_start, s.ratio_upper_start
        quotient = evaluate(low, high)
        while self.read(quotient) < target and low < s.ratio_lower_max:
            low = min(low + s.ratio_lower_step, s.ratio_lower_max)
            quotient = evaluate(low, high)
            if self.read(quotient) >= target:
                break
        while self.read(quotient) < target and high < s.ratio_upper_max:
            high = min(high + s.ratio_upper_step, s.ratio_upper_max)
            quotient = evaluate(low, high)
            if self.read(quotient) >= target:
                break
        # The released code reads the value once more to log it.
        self.read(quotient)
        return low, high


def times_s(tasks: dict[str, Callable[[], object]], num_repeats: int) -> dict[str, tuple[float, float]]:
    """Return each task's median (CPU, wall-clock) seconds over interleaved repeats."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in tasks}
    for repeat in range(1 + num_repeats):
        for name, task in tasks.items():
            cpu, wall = thread_time(), perf_counter()
            task()
            if repeat > 0:
                samples[name].append((thread_time() - cpu, perf_counter() - wall))
    return {name: (median(cpu for cpu, _ in each), median(wall for _, wall in each)) for name, each in samples.items()}


def make_tokens(spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return current and behaviour log-probs, advantages and mask, each float32 [T]."""
    generator = torch.Generator().manual_seed(0)
    behaviour_T = torch.randn(NUM_TOKENS, generator=generator) - 5
    current_T = behaviour_T + torch.randn(NUM_TOKENS, generator=generator) * spread
    return current_T, behaviour_T, torch.randn(NUM_TOKENS, generator=generator), torch.ones(NUM_TOKENS)


def search_log_probs(search: Callable[[Tensor], ClipBounds], current_T: Tensor, behaviour_T: Tensor) -> ClipBounds:
    """Run the search on the same inputs as the loop."""
    return search(current_T - behaviour_T)


def main() -> None:
    torch.set_num_threads(1)
    rows, figures, best_case_times, worst_case_speedups, nums_evaluations = [], {}, [], [], []
    for spread in SPREADS:
        current_T, behaviour_T, advantages_T, mask_T = make_tokens(spread)
        for case, target in TARGETS.items():
            settings = ClipBoundsSettings(
                positive_contribution_target=target, search_order="lower_first", target_measure="ratio"
            )
            one_pass = partial(find_clip_bounds, advantages=advantages_T, settings=settings, mask=mask_T)
            loop, reduced = ReleasedLoop(settings), []
            found = search_log_probs(partial(one_pass, reduce=reduced.append), current_T, behaviour_T)
            bounds = loop(current_T, behaviour_T, advantages_T, mask_T)
            assert bounds == (found.low.item(), found.high.item()), f"the loop found {bounds}, the search {found}"
            num_evaluations, num_host_reads = loop.num_evaluations, loop.num_host_reads

            times = times_s(
                {
                    "loop": partial(loop, current_T, behaviour_T, advantages_T, mask_T),
                    "search": partial(search_log_probs, one_pass, current_T, behaviour_T),
                },
                NUM_REPEATS[case],
            )
            (loop_s, loop_wall_s), (search_s, search_wall_s) = times["loop"], times["search"]
            for name, evaluations, collectives, reads, cpu_s, wall_s in (
                ("released loop", num_evaluations, num_evaluations, num_host_reads, loop_s, loop_wall_s),
                ("one pass", 1, len(reduced), 1, search_s, search_wall_s),
            ):
                rows.append((spread, case, name, evaluations, collectives, reads, cpu_s * 1e3, wall_s * 1e3))
            figures |= {f"loop_{case}_s_{spread}": loop_s, f"search_{case}_s_{spread}": search_s}
            if case == "best":
                best_case_times.append(search_s / loop_s)
            else:
                worst_case_speedups.append(loop_s / search_s)
                nums_evaluations.append(num_evaluations)
    ratios = {
        "best_case_time": max(best_case_times),
        "worst_case_speedup": min(worst_case_speedups),
        "worst_case_collectives": float(max(nums_evaluations)),
    }
    columns = ("spread", "case", "version", "evaluations", "all-reduces", "host waits", "CPU ms", "wall ms")
    report("clip_bounds", columns, rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
