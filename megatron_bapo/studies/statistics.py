"""Comparisons of a study's arms, paired by seed, and the criteria of collapse.

Shapes: N pairs of runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from megatron_bapo.errors import UserError
from megatron_bapo.studies.study import Collapse, Statistics, Study
from megatron_bapo.studies.table import Cell, StudyTable


@dataclass(frozen=True)
class Comparison:
    """Difference of an arm from a reference arm, over the pairs of runs that have both."""

    arm: str
    reference: str
    variant: str | None
    """Variant of the pairs; None: the pairs of all variants and stalenesses above 1 together."""
    updates_per_step: int | None
    num_pairs: int
    mean: float
    """Mean difference, arm minus reference."""
    low: float
    """Lower end of the bootstrap interval."""
    high: float
    p: float
    """p-value of `sign_flip_test`."""
    p_adjusted: float = float("nan")
    """The same with Holm's correction for the number of comparisons of its kind, per cell or over all cells."""


def compare(study: Study, table: StudyTable) -> list[Comparison]:
    """Return all comparisons that the table has pairs for: first those over all cells, then those of each cell.

    Raises UserError if a run of a pair has no outcome and the study does not say what it counts with.
    """
    settings = study.statistics
    if settings is None:
        return []
    over_all, by_cell = list[Comparison](), list[Comparison]()
    for reference, arms in settings.reference.items():
        for arm in arms:
            differences = {
                cell: _outcome(settings, table, cell) - _outcome(settings, table, cell.of_arm(reference))
                for cell in _pairs(study, table, arm, reference)
            }
            stale = [d for cell, d in differences.items() if cell.updates_per_step > 1]
            over_all += _comparison(arm, reference, None, None, stale, settings)
            for variant in study.variants:
                for updates in sorted(study.updates_per_step):
                    here = [
                        d
                        for cell, d in differences.items()
                        if (cell.variant, cell.updates_per_step) == (variant, updates)
                    ]
                    by_cell += _comparison(arm, reference, variant, updates, here, settings)
    return [*_with_correction(over_all), *_with_correction(by_cell)]


def bootstrap_interval(differences_N: np.ndarray, level: float, num_resamples: int) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean (Efron and Tibshirani 1993, section 13.3).

    The random numbers are fixed, so that equal differences have equal intervals. A few pairs have few distinct
    resamples, and the interval is then too short: of 3 normal differences, a 95% interval has the mean in about 75%.
    """
    chosen = np.random.default_rng(0).integers(len(differences_N), size=(num_resamples, len(differences_N)))
    low, high = np.quantile(differences_N[chosen].mean(1), ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


def sign_flip_test(differences_N: np.ndarray, num_resamples: int) -> float:
    """Return the two-sided p-value of the mean under random signs of the differences (Fisher 1935, section 21).

    All signs are tried if there are no more than `num_resamples` of them, otherwise as many random ones. The smallest
    possible value is 2 / 2^N, so that three pairs alone can never give less than 0.25.
    """
    num = len(differences_N)
    if 2**num <= num_resamples:
        signs, own = np.array(list(product((1.0, -1.0), repeat=num))), 0
    else:
        signs, own = np.random.default_rng(0).choice((1.0, -1.0), size=(num_resamples, num)), 1
    # The tolerance counts sums that are equal but for their rounding.
    extreme = np.abs((signs * differences_N).sum(1)) >= abs(differences_N.sum()) - 1e-12
    return float((extreme.sum() + own) / (len(signs) + own))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that are adjusted for their number (Holm 1979): the k-th of m is multiplied by m - k + 1.

    An adjusted value is at least that of every smaller p-value, and at most 1.
    """
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(np.array(p_values)[order] * factors).clip(max=1.0)
    return adjusted.tolist()


def collapse_reasons(criteria: Collapse, table: StudyTable, cell: Cell, window: int) -> list[str]:
    """Return which criteria of collapse a run meets: `accuracy`, `entropy low`, `entropy high` and `entropy NaN`."""
    accuracy = table.column(cell, criteria.accuracy)
    known = accuracy[~np.isnan(accuracy)]
    reasons = list[str]()
    if np.any(known < np.maximum.accumulate(known) / 2):
        reasons.append("accuracy")
    _, ((start, *later),) = table.window_means([cell], criteria.entropy, window)
    if np.any(np.array(later) < start / 10):
        reasons.append("entropy low")
    if np.any(np.array(later) > 2 * start):
        reasons.append("entropy high")
    step, entropy = (table.column(cell, "update") - 1) // cell.updates_per_step, table.column(cell, criteria.entropy)
    if set(step[step >= 0]) - set(step[~np.isnan(entropy)]):
        reasons.append("entropy NaN")
    return reasons


def comparison_rows(study: Study, comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return the rows of a Markdown table."""
    assert study.statistics is not None
    interval = f"{study.statistics.level:.0%} interval"
    rows = [["arm", "compared with", "cell", "pairs", "difference", interval, "p", "p, corrected"]]
    rows.append(["---"] * len(rows[0]))
    for c in comparisons:
        cell = "all" if c.updates_per_step is None else f"{c.variant} {c.updates_per_step} updates".strip()
        labels = study.arms[c.arm].label, study.arms[c.reference].label
        values = f"{c.mean:+.3f}", f"[{c.low:+.3f}, {c.high:+.3f}]", f"{c.p:.3f}", f"{c.p_adjusted:.3f}"
        rows.append([*labels, cell, str(c.num_pairs), *values])
    return rows


def outcome_rows(study: Study, table: StudyTable) -> list[list[str]]:
    """Return the rows of a Markdown table with the outcome of every run: a row per cell and seed, a column per arm.

    Raises UserError like `compare`.
    """
    assert study.statistics is not None
    runs = set(table.every_cell())
    rows = [["variant", "updates per step", "seed", *(arm.label for arm in study.arms.values())]]
    rows.append(["---"] * len(rows[0]))
    for variant, updates, seed in product(study.variants, sorted(study.updates_per_step), study.seeds):
        cells = [Cell(arm, updates, seed, variant) for arm in study.arms]
        if not runs.isdisjoint(cells):
            values = [f"{_outcome(study.statistics, table, cell):.3f}" if cell in runs else "" for cell in cells]
            rows.append([variant, str(updates), str(seed), *values])
    return rows


def _pairs(study: Study, table: StudyTable, arm: str, reference: str) -> Iterator[Cell]:
    """Yield the cells of the arm in the table that have a cell of the reference arm."""
    for variant in study.variants:
        for updates in study.updates_per_step:
            for cell in table.cells(arm, updates, variant):
                if table.has(cell.of_arm(reference)):
                    yield cell


def _outcome(settings: Statistics, table: StudyTable, cell: Cell) -> float:
    """Return the last value of the outcome in the run's last step, which is NaN in a run that diverged."""
    values = table.column(cell, settings.outcome)[-cell.updates_per_step :]
    known = values[~np.isnan(values)]
    if len(known):
        return float(known[-1])
    if settings.diverged is None:
        raise UserError(
            f"the run {cell.name} has no {settings.outcome} in its last step, as if it had diverged; set "
            "statistics.diverged to the value that such a run counts with, such as 0 for an accuracy"
        )
    return settings.diverged


def _comparison(
    arm: str,
    reference: str,
    variant: str | None,
    updates_per_step: int | None,
    differences: Sequence[float],
    settings: Statistics,
) -> list[Comparison]:
    """Return the comparison, or nothing without pairs."""
    if not differences:
        return []
    values_N = np.array(differences)
    interval = bootstrap_interval(values_N, settings.level, settings.num_resamples)
    p = sign_flip_test(values_N, settings.num_resamples)
    return [Comparison(arm, reference, variant, updates_per_step, len(values_N), float(values_N.mean()), *interval, p)]


def _with_correction(comparisons: Sequence[Comparison]) -> list[Comparison]:
    adjusted = holm([c.p for c in comparisons])
    return [replace(c, p_adjusted=p) for c, p in zip(comparisons, adjusted, strict=True)]
