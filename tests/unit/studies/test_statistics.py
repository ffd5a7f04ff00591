from itertools import product

import numpy as np
import pytest

from megatron_bapo.errors import UserError
from megatron_bapo.studies.map_figures import Panel, map_figure
from megatron_bapo.studies.results import summary_rows
from megatron_bapo.studies.statistics import (
    bootstrap_interval,
    collapse_reasons,
    compare,
    comparison_rows,
    holm,
    outcome_rows,
    sign_flip_test,
)
from megatron_bapo.studies.study import Collapse
from megatron_bapo.studies.table import Cell, StudyTable, write_csv
from tests.unit.studies.studies import make_study


def test_the_bootstrap_interval_has_the_quantiles_of_all_resamples():
    differences = np.array([0.02, -0.01, 0.05])
    means = [np.mean(resample) for resample in product(differences, repeat=3)]  # all are equally likely

    found = bootstrap_interval(differences, level=0.8, num_resamples=200_000)

    assert found == pytest.approx((np.quantile(means, 0.1), np.quantile(means, 0.9)), abs=1e-3)


def test_the_sign_flip_test_counts_signs_with_a_sum_at_least_as_far_from_zero():
    assert sign_flip_test(np.array([0.1, 0.2, 0.3]), 100) == 2 / 8
    assert sign_flip_test(np.array([0.1, -0.2, 0.3]), 100) == 6 / 8  # all but +-(0.1 + 0.2 - 0.3)
    assert sign_flip_test(np.zeros(4), 100) == 1.0


def test_the_sign_flip_test_of_many_pairs_samples_signs():
    differences = np.random.default_rng(1).normal(0.3, 1.0, 12)

    assert sign_flip_test(differences, 4000) == pytest.approx(sign_flip_test(differences, 5000), abs=0.03)


def test_holms_correction_of_an_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


@pytest.fixture
def compared(tmp_path):
    """Return a study and its table; of three seeds, one has no run of the reference at 4 updates."""
    accuracy = {
        ("fixed", 4, 1): 0.2,
        ("moving", 4, 1): 0.3,
        ("fixed", 4, 2): 0.4,
        ("moving", 4, 2): 0.45,
        ("moving", 4, 3): 0.9,
        ("fixed", 1, 1): 0.5,
        ("moving", 1, 1): 0.1,
    }
    study, _ = make_study(
        tmp_path,
        seeds=[1, 2, 3],
        arms={"fixed": {"label": "PPO"}, "moving": {"label": "BAPO"}},
        statistics={"outcome": "accuracy", "reference": {"fixed": ["moving"]}},
    )
    rows = [{**Cell(*cell).columns(), "update": 8, "accuracy": value} for cell, value in accuracy.items()]
    write_csv(study.output / "updates.csv", rows)
    return study, StudyTable(study.output / "updates.csv")


def test_arms_are_compared_by_the_seeds_that_both_have_and_over_stale_cells_together(compared):
    over_all, at_one, at_four = compare(*compared)

    assert (over_all.variant, over_all.updates_per_step, over_all.num_pairs) == (None, None, 2)
    assert (at_one.updates_per_step, at_one.num_pairs, at_one.mean) == (1, 1, pytest.approx(-0.4))
    assert (at_four.updates_per_step, at_four.num_pairs, at_four.mean) == (4, 2, pytest.approx(0.075))
    assert (over_all.mean, over_all.p, over_all.p_adjusted) == (pytest.approx(0.075), 0.5, 0.5)
    assert (at_four.p, at_four.p_adjusted) == (0.5, 1.0)


def diverged(tmp_path, value: str, **statistics):
    """Return a study and its table, in which BAPO's first run has `value` at the end and an accuracy before."""
    study, _ = make_study(
        tmp_path,
        arms={"fixed": {"label": "PPO"}, "moving": {"label": "BAPO"}},
        statistics={"outcome": "accuracy", "reference": {"fixed": ["moving"]}, **statistics},
    )
    cells = [Cell(arm, 4, seed) for arm in ("fixed", "moving") for seed in (1, 2)]
    rows = [
        {**cell.columns(), "update": update, "accuracy": value if (cell, update) == (Cell("moving", 4, 1), 8) else 0.5}
        for cell in cells
        for update in (4, *range(5, 9))
    ]
    for row in rows:
        row["accuracy"] = row["accuracy"] if row["update"] in (4, 8) else None
    write_csv(study.output / "updates.csv", rows)
    return study, StudyTable(study.output / "updates.csv")


@pytest.mark.parametrize("value", ["", "nan"])
def test_a_run_without_an_outcome_in_its_last_step_is_named_and_not_compared(tmp_path, value):
    with pytest.raises(UserError, match=r"run moving-4x-seed1 has no accuracy in its last step.*statistics\.diverged"):
        compare(*diverged(tmp_path, value))


def test_a_run_that_diverged_counts_with_the_value_that_the_study_names(tmp_path):
    over_all, at_four = compare(*diverged(tmp_path, "", diverged=0.0))

    assert (at_four.num_pairs, at_four.mean, at_four.p) == (2, -0.25, 1.0)
    assert (over_all.mean, over_all.low, over_all.high) == (-0.25, -0.5, 0.0)


def test_the_table_of_comparisons_has_the_labels_and_the_interval(compared):
    study, table = compared
    header, _, first, *_ = comparison_rows(study, compare(study, table))

    assert header[5] == "95% interval"
    assert first == ["BAPO", "PPO", "all", "2", "+0.075", "[+0.050, +0.100]", "0.500", "0.500"]


def test_the_table_of_outcomes_has_every_run_beside_those_of_its_seed(compared):
    assert outcome_rows(*compared) == [
        ["variant", "updates per step", "seed", "PPO", "BAPO"],
        ["---"] * 5,
        ["", "1", "1", "0.500", "0.100"],
        ["", "4", "1", "0.200", "0.300"],
        ["", "4", "2", "0.400", "0.450"],
        ["", "4", "3", "", "0.900"],
    ]


@pytest.mark.parametrize(
    ("accuracy", "entropy", "reasons"),
    [
        ([0.2, 0.4, 0.21], [1.0, 1.9, 0.11], []),
        ([0.2, 0.4, 0.19], [1.0, 1.0, 1.0], ["accuracy"]),
        ([0.4, 0.1, 0.4], [1.0, 1.0, 1.0], ["accuracy"]),
        ([0.2, 0.2, 0.2], [1.0, 0.09, 1.0], ["entropy low"]),
        ([0.2, 0.2, 0.0], [1.0, 0.09, 2.1], ["accuracy", "entropy low", "entropy high"]),
    ],
)
def test_a_run_has_collapsed_by_accuracy_or_entropy(tmp_path, accuracy, entropy, reasons):
    cell = Cell("a", 1, 1)
    # An evaluation after every two updates, and windows of two updates whose mean is the given entropy.
    rows = [
        {
            **cell.columns(),
            "update": update,
            "accuracy": accuracy[update // 2 - 1] if update and update % 2 == 0 else None,
            "entropy": None if update == 0 else entropy[(update - 1) // 2] * (0.5 if update % 2 else 1.5),
        }
        for update in range(7)
    ]
    write_csv(tmp_path / "updates.csv", rows)

    criteria = Collapse(accuracy="accuracy", entropy="entropy")
    assert collapse_reasons(criteria, StudyTable(tmp_path / "updates.csv"), cell, window=2) == reasons


def with_entropy(tmp_path, cells, entropy):
    """Return the table of runs of four updates with the given entropies, as the study writes them."""
    rows = [
        {**cell.columns(), "update": update, "accuracy": 0.5 if update in (0, 4) else None, "entropy": value}
        for cell in cells
        for update, value in enumerate([None, *entropy(cell)])
    ]
    write_csv(tmp_path / "updates.csv", rows)
    return StudyTable(tmp_path / "updates.csv")


@pytest.mark.parametrize(
    ("updates_per_step", "entropy", "reasons"),
    [
        (1, [1.0, 1.0, None, None], ["entropy NaN"]),
        (1, [None, None, None, None], ["entropy NaN"]),
        (1, [1.0, 1.0, 1.0, float("nan")], ["entropy NaN"]),
        (2, [1.0, 1.0, None, None], ["entropy NaN"]),
        (2, [1.0, None, 1.0, None], []),  # a metric of a step is in the row of its first update
    ],
)
def test_a_run_whose_entropy_is_nan_has_collapsed(tmp_path, updates_per_step, entropy, reasons):
    cell = Cell("a", updates_per_step, 1)
    table = with_entropy(tmp_path, [cell], lambda _: entropy)

    assert collapse_reasons(Collapse(accuracy="accuracy", entropy="entropy"), table, cell, window=2) == reasons


def test_maps_and_the_summary_count_a_run_whose_entropy_is_nan_as_collapsed(tmp_path):
    criteria = Collapse(accuracy="accuracy", entropy="entropy")
    study, _ = make_study(tmp_path, num_updates=4, window=2, collapse=criteria.model_dump())
    cells = [Cell("fixed", 4, seed) for seed in (1, 2)]
    table = with_entropy(tmp_path, cells, lambda cell: [1.0, 1.0, 1.0, 1.0] if cell.seed == 1 else [None] * 4)

    assert summary_rows(study, table)[2][-1] == "1 of 2 (entropy NaN)"
    figure = map_figure(
        table,
        [Panel("PPO", "fixed")],
        [""],
        [4],
        "accuracy",
        "Map",
        lambda cell: bool(collapse_reasons(criteria, table, cell, study.window)),
    )
    (axis,) = figure.axes
    assert "2 seeds\n1 collapsed" in [text.get_text() for text in axis.texts]
