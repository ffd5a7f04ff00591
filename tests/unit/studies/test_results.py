import csv
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_bapo.studies import results
from megatron_bapo.studies.results import collect, plot_study, summary_rows
from megatron_bapo.studies.table import StudyTable
from tests.unit.studies.studies import make_study, write_run


@pytest.fixture
def collected(tmp_path: Path):
    """Return the study, its output folder and the console output; the last run is not finished."""
    study, runs = make_study(tmp_path)
    for run in runs[:-1]:
        write_run(run)
    console = Console(record=True, width=200, file=StringIO())
    collect(study, runs, console)
    return study, study.output, console.export_text()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_table_has_a_row_per_update_with_a_steps_values_at_its_first_update(collected):
    _, output, _ = collected
    found = [row for row in rows(output / "updates.csv") if (row["arm"], row["seed"]) == ("moving", "2")]

    assert [row["update"] for row in found] == [str(update) for update in range(9)]
    assert [row["reward"] for row in found] == ["", "200", "", "", "", "204", "", "", ""]
    assert [row["entropy"] for row in found] == ["", *(str(update) for update in range(1, 9))]
    assert [row["accuracy"] for row in found] == ["0.125", *[""] * 7, "0.5"]


def test_runs_that_are_not_finished_are_counted_and_the_next_one_is_named(collected):
    _, output, printed = collected

    at_one = {row["seed"] for row in rows(output / "updates.csv") if row["updates_per_step"] == "1"}
    assert at_one == {"1"}
    assert "not finished: 1 of 6 runs; next: fixed-1x-seed2" in printed


def test_tokens_without_advantage_are_skipped_and_updates_are_numbered_across_steps(collected):
    _, output, _ = collected
    found = rows(output / "tokens.csv")

    assert {(row["arm"], row["updates_per_step"]) for row in found} == {("fixed", "4")}
    assert {row["advantage_sign"] for row in found} == {"1", "-1"}
    assert sorted({int(row["update"]) for row in found}) == list(range(1, 9))
    assert len(found) == 2 * 8 * 8


def test_the_summary_is_over_the_last_updates_and_the_seeds(collected):
    study, output, _ = collected
    lines = summary_rows(study, StudyTable(output / "updates.csv"))

    assert lines[0] == ["arm", "updates per step", "seeds", "reward", "accuracy"]
    assert ["BAPO", "4", "2", "154.000 ± 70.711", "0.375 ± 0.177"] in lines
    assert ["PPO", "1", "1", "105.500 ± 0.000", "0.250 ± 0.000"] in lines
    assert "| BAPO | 4 | 2 | 154.000 ± 70.711 | 0.375 ± 0.177 |" in (output / "summary.md").read_text()


def test_a_column_without_values_in_the_last_updates_is_named_in_the_summary(collected):
    study, output, _ = collected
    path = output / "updates.csv"
    found = rows(path)
    for row in found:
        row["reward"] = row["reward"] if (row["arm"], row["seed"]) == ("bapo", found[0]["seed"]) else ""
    lines = [list(found[0]), *(row.values() for row in found)]
    path.write_text("".join(",".join(line) + "\n" for line in lines))
    shown = {(row[0], row[3]) for row in summary_rows(study, StudyTable(path))[2:]}

    assert ("PPO", "none") in shown
    assert all(reward == "none" or reward.endswith("± 0.000") for _, reward in shown)


@pytest.mark.slow
def test_figures_need_only_the_tables_and_are_reproducible(collected):
    study, output, _ = collected
    first = {path.name: path.read_bytes() for path in output.glob("*.png")}
    assert sorted(first) == ["boxes.png", "curves.png", "scatter.png"]
    for path in output.glob("*.png"):
        path.unlink()

    plot_study(study, Console(quiet=True))

    assert {path.name: path.read_bytes() for path in output.glob("*.png")} == first


def test_the_tables_are_written_before_the_figures(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(results, "save_png", fail)
    study, runs = make_study(tmp_path)
    for run in runs:
        write_run(run)

    with pytest.raises(OSError, match="the disk is full"):
        collect(study, runs, Console(quiet=True))
    assert {"updates.csv", "tokens.csv", "summary.md"} <= {path.name for path in study.output.iterdir()}


def test_differences_are_skipped_before_there_is_a_pair(tmp_path):
    differences = {"kind": "differences", "title": "D", "arms": ["moving"], "updates_per_step": [4]}
    statistics = {"outcome": "accuracy", "reference": {"fixed": ["moving"]}}
    study, runs = make_study(tmp_path, figures={"differences": differences}, statistics=statistics)
    (run,) = [run for run in runs if run.name == "moving-4x-seed1"]
    write_run(run)
    console = Console(record=True, width=200, file=StringIO())
    collect(study, runs, console)

    assert "skipped: differences; the tables contain none of its runs" in console.export_text()
    assert not (study.output / "differences.png").exists()


def test_nothing_is_written_before_a_run_is_finished(tmp_path):
    study, runs = make_study(tmp_path)
    collect(study, runs, Console(quiet=True))

    assert not study.output.exists()
