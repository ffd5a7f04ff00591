"""What n sampled answers to each of many problems say of a model, and how surely.

All are means over problems of an unbiased estimate for each problem, so that problems, which do not influence each
other, carry the uncertainty; the answers to one problem do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Votes:
    """The answers to one problem, by what they say."""

    right: int
    wrong: tuple[int, ...]
    """How many say each wrong thing."""
    silent: int = 0
    """In which nothing was found to count; they are wrong and do not vote."""

    @property
    def num(self) -> int:
        return self.right + sum(self.wrong) + self.silent


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """The probability that k of the `num` answers, drawn without repeats, hold a right one.

    Unbiased for k fresh answers: 1 - C(n - c, k) / C(n, k), Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    """
    _check_k(k, num)
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def majority_at_k(votes: Votes, k: int) -> float:
    """The probability that the most frequent answer among k, drawn without repeats, is the right one.

    A tie is decided by lot among those that share it; where nobody votes the vote is lost. Exact: draws are counted.
    """
    _check_k(k, votes.num)
    favourable = 0.0
    for top in range(1, min(votes.right, k) + 1):  # right answers drawn, and the most that any other may have
        draws = _draws(votes, num=k - top, top=top)
        favourable += math.comb(votes.right, top) * sum(ways / (1 + tied) for tied, ways in enumerate(draws))
    return min(1.0, favourable / math.comb(votes.num, k))


def _draws(votes: Votes, num: int, top: int) -> list[int]:
    """Ways to draw `num` answers that are not right, none of them more than `top` times, by how many reach `top`."""
    most_tied = num // top
    ways = [[0] * (num + 1) for _ in range(most_tied + 1)]  # [answers that reach top][answers drawn]
    ways[0] = [math.comb(votes.silent, drawn) for drawn in range(num + 1)]
    for size in votes.wrong:
        extended = [[0] * (num + 1) for _ in ways]
        for tied, row in enumerate(ways):
            for drawn, count in enumerate(row):
                if not count:
                    continue
                for more in range(min(size, top, num - drawn) + 1):
                    extended[tied + (more == top)][drawn + more] += count * math.comb(size, more)
        ways = extended
    return [row[num] for row in ways]


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, with the interval that would hold the mean over all problems of their kind."""

    value: float
    low: float
    high: float
    standard_error: float | None
    """Clustered by problem; None for one problem."""


def over_problems(values: Sequence[float], *, num_answers: int, confidence: float = 0.95) -> Estimate:
    """The mean of one value in 0..1 for each problem, and Wilson's interval for it at the effective sample size.

    The standard error is clustered: that of a mean of independent problems, whatever goes on within them. The
    effective size is the number of independent coin tosses with that error, so that the interval stays within 0..1 and
    is none too short where all problems agree; it is capped at `num_answers`, the independent answers, or draws of
    several answers, that there are. Franco, Little,
    Louis and Slud 2019, "Comparative study of confidence intervals for proportions in complex sample surveys".
    """
    num, mean = len(values), math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(squares / (num - 1) / num) if num > 1 else None
    variance = mean * (1.0 - mean)
    tosses = num if variance <= 0.0 else variance / error**2 if error else num_answers
    size = min(tosses, num_answers) if num > 1 else 1
    z = _quantile((1.0 + confidence) / 2.0, num - 1)
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(variance / size + z * z / (4 * size * size))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), error)


def error_of_repeating(num_right: Sequence[int], num: int) -> float | None:
    """Standard error of the mean accuracy over fresh answers to the same problems; None for one answer each."""
    if num < 2:
        return None
    within = math.fsum((right / num) * (1 - right / num) / (num - 1) for right in num_right)
    return math.sqrt(within) / len(num_right)


def _quantile(probability: float, degrees: int) -> float:
    """Of Student's t, by the expansion of Cornish and Fisher in 1 / degrees (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    if degrees < 1:
        return z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def _check_k(k: int, num: int) -> None:
    assert 1 <= k <= num, f"k={k} of {num} answers"
