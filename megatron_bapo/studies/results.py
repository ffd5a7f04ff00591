"""Tables and figures of a study."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure as Plot
from rich.console import Console

from megatron_bapo.files import replace_text
from megatron_bapo.studies.figures import (
    Curve,
    curves_figure,
    ratio_boxes_figure,
    save_png,
    token_scatter_figure,
)
from megatron_bapo.studies.map_figures import Panel, differences_figure, map_figure
from megatron_bapo.studies.plan import StudyRun
from megatron_bapo.studies.statistics import collapse_reasons, compare, comparison_rows, outcome_rows
from megatron_bapo.studies.study import Figure, Study
from megatron_bapo.studies.table import Cell, Row, StudyTable, read_table, token_rows, update_rows, write_csv


def collect(study: Study, runs: Sequence[StudyRun], console: Console) -> None:
    """Add finished runs to the tables, and write figures and summary; the console counts the unfinished runs.

    Runs that the tables have and this machine does not stay in them.
    """
    results = [run for run in runs if run.cell is not None]
    open_runs = [run.name for run in results if not run.finished]
    if open_runs:
        console.print(f"not finished: {len(open_runs)} of {len(results)} runs; next: {open_runs[0]}")
    finished = {run.cell: run.config.run_dir for run in runs if run.cell is not None and run.marker.exists()}
    updates_csv, tokens_csv = study.output / "updates.csv", study.output / "tokens.csv"
    if not finished and not updates_csv.exists():
        console.print("nothing to collect yet: no run is finished")
        return
    _add(updates_csv, study, finished, lambda cell, run_dir: update_rows(cell, run_dir, study.columns))
    sampled = {c: run_dir for c, run_dir in finished.items() if c.updates_per_step in study.tokens_of.get(c.arm, ())}
    if sampled or tokens_csv.exists():
        _add(tokens_csv, study, sampled, token_rows)
    plot_study(study, console)


def _add(
    path: Path, study: Study, finished: dict[Cell, Path], rows_of: Callable[[Cell, Path], Sequence[Row] | Iterator[Row]]
) -> None:
    """Add the rows of finished runs to a table, in the study's order; other cells of the table come last."""
    table = read_table(path)
    others = [] if table is None else table.every_cell()
    order = dict.fromkeys([*study.cells(), *others])

    def rows() -> Iterator[Row]:
        for cell in order:
            if cell in finished:
                yield from rows_of(cell, finished[cell])
            elif table is not None:
                yield from table.rows(cell)

    write_csv(path, rows())


def plot_study(study: Study, console: Console) -> None:
    """Write summary, outcomes, comparisons and figures from the tables."""
    table, tokens = StudyTable(study.output / "updates.csv"), read_table(study.output / "tokens.csv")
    _write_rows(study.output / "summary.md", summary_rows(study, table))
    if study.statistics is not None:
        _write_rows(study.output / "outcomes.md", outcome_rows(study, table))
        _write_rows(study.output / "comparisons.md", comparison_rows(study, compare(study, table)))
    for name, figure in study.figures.items():
        source = tokens if figure.kind in ("ratio_boxes", "token_scatter") else table
        plot = None if source is None else _plot(study, figure, table, source)
        if plot is None:
            console.print(f"skipped: {name}; the tables contain none of its runs")
        else:
            save_png(plot, study.output / f"{name}.png")
    console.print(f"tables and figures are in {study.output}", soft_wrap=True)


def _cells(study: Study, table: StudyTable, figure: Figure) -> list[Cell]:
    return [
        cell
        for arm in figure.arms
        for variant in figure.variants or study.variants
        for updates in figure.updates_per_step
        for cell in table.cells(arm, updates, variant)
    ]


def _plot(study: Study, figure: Figure, table: StudyTable, source: StudyTable) -> Plot | None:
    """Plot the runs or pairs of runs that the tables have; None if there are none."""
    shown = _cells(study, source, figure)
    if not shown:
        return None
    match figure.kind:
        case "curves":
            groups = dict.fromkeys((cell.arm, cell.updates_per_step, cell.variant) for cell in shown)
            curves = [Curve(_label(study, figure, *group), *group) for group in groups]
            return curves_figure(table, curves, figure.panels, figure.title, study.window)
        case "ratio_boxes":
            return ratio_boxes_figure(source, shown, figure.title)
        case "token_scatter":
            return token_scatter_figure(source, shown, figure.title)
        case "map":
            (column,) = figure.panels
            panels = [Panel(study.arms[arm].label, arm) for arm in figure.arms]
            axes = figure.variants or list(study.variants), sorted(figure.updates_per_step)
            return map_figure(
                table, panels, *axes, column, figure.title, lambda cell: bool(_collapsed(study, table, cell))
            )
        case "differences":
            labels = {name: arm.label for name, arm in study.arms.items()}
            compared = [c for c in compare(study, table) if c.arm in figure.arms]
            return differences_figure(compared, labels, figure.title) if compared else None


def _collapsed(study: Study, table: StudyTable, cell: Cell) -> list[str]:
    return [] if study.collapse is None else collapse_reasons(study.collapse, table, cell, study.window)


def _label(study: Study, figure: Figure, arm: str, updates: int, variant: str) -> str:
    parts = [
        *([study.arms[arm].label] if len(figure.arms) > 1 else []),
        *([variant] if len(figure.variants or study.variants) > 1 else []),
        *([f"{updates} update{'s' if updates > 1 else ''}"] if len(figure.updates_per_step) > 1 else []),
    ]
    return ", ".join(parts) or study.arms[arm].label


def _write_rows(path: Path, rows: Sequence[Sequence[str]]) -> None:
    replace_text(path, "".join(f"| {' | '.join(row)} |\n" for row in rows))


def _mean_and_std(values: np.ndarray) -> str:
    """Format values [seeds]; `none` if no seed has one, as for the length of right responses if all are wrong."""
    if not len(values):
        return "none"
    return f"{values.mean():.3f} ± {values.std(ddof=1) if len(values) > 1 else 0.0:.3f}"


def summary_rows(study: Study, table: StudyTable) -> list[list[str]]:
    """Return the rows of a Markdown table with mean and standard deviation over seeds of each arm's last updates.

    With criteria of collapse a column has the number of runs that meet one of them.
    """
    variants = list(study.variants) if len(study.variants) > 1 else []
    header = ["arm", *(["variant"] if variants else []), "updates per step", "seeds", *study.summary]
    header += ["collapsed"] if study.collapse else []
    rows = [header, ["---"] * len(header)]
    for name, arm in study.arms.items():
        for variant in study.variants:
            for updates in sorted(study.updates_per_step):
                if cells := table.cells(name, updates, variant):
                    values = [table.final(cells, column, study.final_updates) for column in study.summary]
                    shown = [_mean_and_std(of_seeds[~np.isnan(of_seeds)]) for of_seeds in values]
                    reasons = [_collapsed(study, table, cell) for cell in cells]
                    kinds = ", ".join(sorted({reason for each in reasons for reason in each}))
                    found = f"{sum(map(bool, reasons))} of {len(cells)}{f' ({kinds})' if kinds else ''}"
                    where = [variant] if variants else []
                    rows.append(
                        [arm.label, *where, str(updates), str(len(cells)), *shown, *([found] if study.collapse else [])]
                    )
    return rows
