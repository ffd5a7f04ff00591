import numpy as np
import pytest

from megatron_bapo.studies.table import Cell, StudyTable, write_csv

CELLS = [Cell("a", 2, seed) for seed in (1, 2)]


@pytest.fixture
def table(tmp_path) -> StudyTable:
    rows = [
        {**cell.columns(), "update": update, "x": None if update % 2 == 0 else cell.seed * 10.0 + update}
        for cell in CELLS
        for update in range(7)
    ]
    write_csv(tmp_path / "table.csv", rows)
    return StudyTable(tmp_path / "table.csv")


def test_missing_values_are_empty_and_read_as_nan(table):
    assert table.cells("a", 2) == CELLS
    assert table.cells("a", 1) == []
    np.testing.assert_equal(table.column(CELLS[1], "x"), [np.nan, 21, np.nan, 23, np.nan, 25, np.nan])


def test_a_window_is_the_mean_of_its_values(table):
    ends, means = table.window_means(CELLS, "x", 3)

    assert ends.tolist() == [3, 6]
    assert means.tolist() == [[12, 15], [22, 25]]


def test_a_window_without_a_value_is_nan(table):
    _, means = table.window_means(CELLS, "x", 1)

    np.testing.assert_equal(means[0], [11, np.nan, 13, np.nan, 15, np.nan])


def test_the_end_is_the_mean_over_the_last_updates(table):
    assert table.final(CELLS, "x", 4).tolist() == [14, 24]


def test_numbers_have_four_digits(tmp_path):
    write_csv(tmp_path / "table.csv", [{"arm": "a", "update": 123456, "x": 1 / 3, "y": None, "z": float("nan")}])

    assert (tmp_path / "table.csv").read_text() == "arm,update,x,y,z\na,123456,0.3333,,nan\n"
