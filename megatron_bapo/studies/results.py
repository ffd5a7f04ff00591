"""Tables and figures of a study."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from megatron_bapo.metrics.sinks import replace_text
from megatron_bapo.studies.figures import (
    Curve,
    curves_figure,
    ratio_boxes_figure,
    save_png,
    token_scatter_figure,
)
from megatron_bapo.studies.plan import Figure, Study, StudyRun
from megatron_bapo.studies.table import StudyTable, token_rows, update_rows, write_csv


def collect(study: Study, runs: Sequence[StudyRun], console: Console) -> None:
    """Write tables and figures from all complete seeds.

    A seed is complete at a staleness if all arms there are finished; the console lists the incomplete ones.
    """
    cells = [(run.cell, run) for run in runs if run.cell is not None]
    incomplete = {(cell.updates_per_step, cell.seed) for cell, run in cells if not run.finished.exists()}
    kept = [(cell, run) for cell, run in cells if (cell.updates_per_step, cell.seed) not in incomplete]
    for updates, seed in sorted(incomplete):
        missing = [
            c.arm for c, run in cells if (c.updates_per_step, c.seed) == (updates, seed) and not run.finished.exists()
        ]
        console.print(f"skipped: seed {seed} at {updates} updates per step; not finished: {', '.join(missing)}")
    if not kept:
        console.print("nothing to collect yet: no seed is complete at any number of updates per step")
        return
    rows = (row for cell, run in kept for row in update_rows(cell, run.config.run_dir, study.columns))
    write_csv(study.output / "updates.csv", rows)
    sampled = [(c, run) for c, run in kept if c.updates_per_step in study.tokens_of.get(c.arm, ())]
    write_csv(
        study.output / "tokens.csv", (row for cell, run in sampled for row in token_rows(cell, run.config.run_dir))
    )
    plot_study(study, console)


def plot_study(study: Study, console: Console) -> None:
    """Write figures and summary from the tables."""
    table, tokens = StudyTable(study.output / "updates.csv"), StudyTable(study.output / "tokens.csv")
    for name, figure in study.figures.items():
        source = table if figure.kind == "curves" else tokens
        shown = [(a, u) for a in figure.arms for u in figure.updates_per_step if source.cells(a, u)]
        if not shown:
            console.print(f"skipped: {name}; the tables contain none of its runs")
            continue
        if figure.kind == "curves":
            curves = [Curve(_label(study, figure, arm, updates), arm, updates) for arm, updates in shown]
            plotted = curves_figure(table, curves, figure.panels, figure.title, study.window)
        else:
            sampled = [cell for arm, updates in shown for cell in tokens.cells(arm, updates)]
            plot = ratio_boxes_figure if figure.kind == "ratio_boxes" else token_scatter_figure
            plotted = plot(tokens, sampled, figure.title)
        save_png(plotted, study.output / f"{name}.png")
    summary = summary_rows(study, table)
    replace_text(study.output / "summary.md", "".join(f"| {' | '.join(row)} |\n" for row in summary))
    console.print(f"tables and figures are in {study.output}", soft_wrap=True)


def _label(study: Study, figure: Figure, arm: str, updates: int) -> str:
    by_updates = f"{updates} update{'s' if updates > 1 else ''}"
    if len(figure.arms) == 1:
        return by_updates
    label = study.arms[arm].label
    return label if len(figure.updates_per_step) == 1 else f"{label}, {by_updates}"


def summary_rows(study: Study, table: StudyTable) -> list[list[str]]:
    """Return the rows of a Markdown table with mean and standard deviation over seeds of each arm's last updates."""
    header = ["arm", "updates per step", "seeds", *study.summary]
    rows = [header, ["---"] * len(header)]
    for name, arm in study.arms.items():
        for updates in sorted(arm.updates_per_step or study.updates_per_step):
            if cells := table.cells(name, updates):
                values = [table.final(cells, column, study.final_updates) for column in study.summary]
                shown = [f"{v.mean():.3f} ± {v.std(ddof=1) if len(v) > 1 else 0.0:.3f}" for v in values]
                rows.append([arm.label, str(updates), str(len(cells)), *shown])
    return rows
