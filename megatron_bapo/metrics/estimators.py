"""Accuracy estimates and confidence intervals from n sampled responses to each of many problems.

Every estimate is a mean over problems of an unbiased estimate for each problem. Its uncertainty is computed over
problems, which are independent of each other; the responses to one problem are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist


@dataclass(frozen=True)
class Votes:
    """Responses to one problem, counted by their extracted answers."""

    right: int
    wrong: tuple[int, ...]
    """Number of responses with each distinct wrong answer."""
    no_answer: int = 0
    """Number of responses without an extracted answer; they are wrong and do not vote."""

    @property
    def num(self) -> int:
        return self.right + sum(self.wrong) + self.no_answer


def pass_at_k(num: int, num_right: int, k: int) -> float:
    """Return the probability that k of the `num` responses, sampled without replacement, include a right one.

    This is unbiased for k new responses: 1 - C(n - c, k) / C(n, k), Chen et al. 2021 (arXiv 2107.03374), eq. 1.
    """
    _check_k(k, num)
    return 1.0 - math.comb(num - num_right, k) / math.comb(num, k)


def majority_at_k(votes: Votes, k: int) -> float:
    """Return the probability that the majority answer of k responses, sampled without replacement, is right.

    Ties are broken at random; if no response has an answer, the result is wrong. The probability is exact: all subsets
    are counted.
    """
    _check_k(k, votes.num)
    favourable = [0] * (len(votes.wrong) + 1)  # by the number of wrong answers that tie with the right one
    for top in range(1, min(votes.right, k) + 1):  # number of right answers, and the limit for every wrong answer
        subsets = _wrong_subsets(votes, num=k - top, top=top)
        for tied, count in enumerate(subsets):
            favourable[tied] += math.comb(votes.right, top) * count
    won = sum(Fraction(count, 1 + tied) for tied, count in enumerate(favourable))
    return float(won / math.comb(votes.num, k))


def _wrong_subsets(votes: Votes, num: int, top: int) -> list[int]:
    """Count the subsets of `num` wrong responses in which no answer occurs more than `top` times.

    Entry i of the result counts the subsets in which i answers occur exactly `top` times.
    """
    most_tied = min(num // top, len(votes.wrong))
    counts = [[0] * (num + 1) for _ in range(most_tied + 1)]  # [answers that occur top times][responses chosen]
    counts[0] = [math.comb(votes.no_answer, chosen) for chosen in range(num + 1)]
    for size in votes.wrong:
        extended = [[0] * (num + 1) for _ in counts]
        for tied, row in enumerate(counts):
            for chosen, count in enumerate(row):
                if not count:
                    continue
                for more in range(min(size, top, num - chosen) + 1):
                    extended[tied + (more == top)][chosen + more] += count * math.comb(size, more)
        counts = extended
    return [row[num] for row in counts]


@dataclass(frozen=True)
class Estimate:
    """Mean over problems with a confidence interval for the mean over all problems of the same kind."""

    value: float
    low: float
    high: float
    standard_error: float | None
    """Standard error clustered by problem; None for a single problem."""


def mean_over_problems(values: Sequence[float], *, num_samples: int, confidence: float = 0.95) -> Estimate:
    """Return the mean of one value in [0, 1] per problem and Wilson's interval at the effective sample size.

    The standard error is clustered by problem: it treats problems as independent and makes no assumption about the
    responses within a problem. The effective sample size is the number of independent coin tosses with that error, so
    that the interval stays within [0, 1] and is not too short where all problems agree. It is capped at `num_samples`,
    the number of responses, or of disjoint sets of k responses. Source: Franco, Little, Louis and Slud 2019,
    "Comparative study of confidence intervals for proportions in complex sample surveys".
    """
    num, mean = len(values), math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    error = math.sqrt(squares / (num - 1) / num) if num > 1 else None
    variance = mean * (1.0 - mean)
    tosses = num if variance <= 0.0 else variance / error**2 if error else num_samples
    size = min(tosses, num_samples) if num > 1 else 1
    z = _student_t_quantile((1.0 + confidence) / 2.0, num - 1)
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(variance / size + z * z / (4 * size * size))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half), error)


def error_of_repeating(num_right: Sequence[int], num: int) -> float | None:
    """Return the standard error of the mean accuracy over new responses to the same problems.

    None if each problem has one response.
    """
    if num < 2:
        return None
    within = math.fsum((right / num) * (1 - right / num) / (num - 1) for right in num_right)
    return math.sqrt(within) / len(num_right)


def _student_t_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t by the Cornish-Fisher expansion in 1 / degrees (Abramowitz, Stegun 26.7.5)."""
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
    assert 1 <= k <= num, f"k={k} of {num} responses"
