import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bapo.metrics.estimators import Votes, error_of_repeating, majority_at_k, mean_over_problems, pass_at_k

votes = st.builds(
    lambda right, wrong, no_answer: Votes(right, tuple(wrong), no_answer),
    st.integers(0, 4),
    st.lists(st.integers(1, 3), max_size=3),
    st.integers(0, 2),
).filter(lambda votes: votes.num > 0)


def answers(votes: Votes) -> list[str | None]:
    wrong = [f"wrong {index}" for index, size in enumerate(votes.wrong) for _ in range(size)]
    return ["right"] * votes.right + wrong + [None] * votes.no_answer


def share_won_by_right_answers(sampled: tuple[str | None, ...]) -> Fraction:
    counts = Counter(answer for answer in sampled if answer is not None)
    top = [answer for answer, count in counts.items() if count == max(counts.values())]
    return Fraction("right" in top, len(top)) if top else Fraction(0)


@given(votes, st.data())
def test_estimates_are_the_means_over_all_subsets(votes: Votes, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, votes.num))
    subsets = list(combinations(answers(votes), k))

    passed = Fraction(sum("right" in subset for subset in subsets), len(subsets))
    won = sum(map(share_won_by_right_answers, subsets), Fraction(0)) / len(subsets)

    assert pass_at_k(votes.num, votes.right, k) == pytest.approx(float(passed), abs=1e-12)
    assert majority_at_k(votes, k) == pytest.approx(float(won), abs=1e-12)


@pytest.mark.parametrize("accuracy", [0.1, 0.5, 0.9])
def test_pass_at_k_is_unbiased_for_new_responses(accuracy: float) -> None:
    """The expectation sums over every number of right responses with its binomial probability."""
    n, k = 9, 4
    mean = math.fsum(
        math.comb(n, c) * accuracy**c * (1 - accuracy) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - accuracy) ** k, abs=1e-12)


def test_pass_at_1_and_majority_at_1_are_the_accuracy() -> None:
    assert pass_at_k(16, 5, 1) == pytest.approx(5 / 16)
    assert majority_at_k(Votes(5, (7, 2), 2), 1) == pytest.approx(5 / 16)


def test_the_most_frequent_answer_wins_a_vote_of_all_responses() -> None:
    assert majority_at_k(Votes(5, (4, 4), 3), 16) == 1.0
    assert majority_at_k(Votes(4, (5, 4), 3), 16) == 0.0
    assert majority_at_k(Votes(4, (4, 4), 4), 16) == pytest.approx(1 / 3)
    assert majority_at_k(Votes(0, (), 16), 16) == 0.0


def test_many_responses_are_counted_quickly_and_without_overflow() -> None:
    assert 0.9 < majority_at_k(Votes(60, (30, 20, *[1] * 18)), 64) < 1.0
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("num_problems", "n", "shape"),
    [(30, 16, (0.5, 0.5)), (30, 16, (2.0, 2.0)), (30, 1, (1.0, 9.0)), (100, 4, (0.2, 1.8)), (10, 4, (1.0, 1.0))],
    ids=str,
)
def test_intervals_contain_the_true_accuracy_with_their_confidence(num_problems, n, shape) -> None:
    """Each problem has an accuracy from a Beta distribution, and its responses are right with this probability."""
    random = np.random.default_rng(0)
    right = random.binomial(n, random.beta(*shape, size=(1500, num_problems)))
    truth = shape[0] / sum(shape)

    found = [mean_over_problems((row / n).tolist(), num_samples=num_problems * n) for row in right]

    coverage = np.mean([estimate.low <= truth <= estimate.high for estimate in found])
    assert 0.935 <= coverage <= 0.985


def test_treating_responses_as_independent_would_give_too_short_intervals() -> None:
    """30 problems that are always or never solved are 30 observations, however many responses each has."""
    solved = [1.0] * 12 + [0.0] * 18
    estimate = mean_over_problems(solved, num_samples=30 * 64)
    naive = 1.96 * math.sqrt(0.4 * 0.6 / (30 * 64))

    assert estimate.standard_error == pytest.approx(np.std(solved, ddof=1) / math.sqrt(30))
    assert estimate.high - estimate.low > 7 * 2 * naive


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_the_interval_has_a_width_if_all_problems_agree(value: float) -> None:
    estimate = mean_over_problems([value] * 30, num_samples=480)
    assert (estimate.low, estimate.high) == pytest.approx((0.0, 0.122) if value == 0.0 else (0.878, 1.0), abs=1e-3)


def test_the_interval_of_a_single_problem_is_wide() -> None:
    estimate = mean_over_problems([0.5], num_samples=16)
    assert estimate.standard_error is None
    assert estimate.high - estimate.low > 0.8


def test_the_error_of_repeating_is_that_of_new_responses_to_the_same_problems() -> None:
    random = np.random.default_rng(1)
    accuracy, n = np.array([0.0, 0.1, 0.5, 0.9, 1.0] * 4), 8
    right = random.binomial(n, accuracy, size=(4000, len(accuracy)))

    estimated = np.mean([(error_of_repeating(row.tolist(), n) or 0.0) ** 2 for row in right])

    assert estimated == pytest.approx(np.sum(accuracy * (1 - accuracy)) / n / len(accuracy) ** 2, rel=0.01)
    assert error_of_repeating([0, 1], 1) is None


def test_a_vote_among_half_of_eleven_hundred_answers_does_not_overflow() -> None:
    assert majority_at_k(Votes(560, (540,)), 550) == pytest.approx(1 - majority_at_k(Votes(540, (560,)), 550))
    assert 0.5 < majority_at_k(Votes(560, (540,)), 550) < 1.0
