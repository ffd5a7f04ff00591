"""CSV table of a study's runs with one row per optimizer update."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_bapo.metrics.sinks import read_rows, replace_text
from megatron_bapo.metrics.token_table import COLUMNS, read_token_tables


@dataclass(frozen=True)
class Cell:
    """One arm of a study at one staleness with one seed."""

    arm: str
    updates_per_step: int
    seed: int

    def columns(self) -> dict[str, str | int]:
        return {"arm": self.arm, "updates_per_step": self.updates_per_step, "seed": self.seed}


CELL_COLUMNS = ("arm", "updates_per_step", "seed")

Row = dict[str, str | int | float | None]


def update_rows(cell: Cell, run_dir: Path, columns: Mapping[str, str]) -> list[Row]:
    """Return the rows of one run; `columns` maps a column to its metric.

    A per-step metric is in the row of the step's first update, because the policy before that update generated the
    trajectories. Evaluation metrics are in the row of the last update before the evaluation; update 0 is the start.
    """
    updates = read_rows(run_dir / "updates.jsonl")
    found = {row["update"]: {c: row["metrics"].get(name) for c, name in columns.items()} for row in updates}
    first = {
        step: min(row["update"] for row in updates if row["step"] == step) for step in {r["step"] for r in updates}
    }
    last = {row["step"]: row["update"] for row in updates} | {0: 0}
    for row in read_rows(run_dir / "metrics.jsonl"):
        if row["phase"] == "warm_start":
            continue
        update = (first if row["phase"] == "train" else last)[row["step"]]
        values = found.setdefault(update, dict.fromkeys(columns))
        for column, name in columns.items():
            if values[column] is None:
                values[column] = row["metrics"].get(name)
    return [{**cell.columns(), "update": update, **found[update]} for update in sorted(found)]


def token_rows(cell: Cell, run_dir: Path) -> Iterator[Row]:
    """Yield a row for each sampled token whose advantage is not zero."""
    for step, table in sorted(read_token_tables(run_dir / "tokens").items()):
        kept = table["advantage_sign"] != 0
        for values in zip(*(table[name][kept].tolist() for name in COLUMNS), strict=True):
            token = dict(zip(COLUMNS, values, strict=True))
            token["update"] = int(token["update"]) + (step - 1) * cell.updates_per_step
            token["advantage_sign"] = int(token["advantage_sign"])
            yield {**cell.columns(), **token}


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows with four significant digits and an empty field for a missing value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for row in rows:
        if not lines:
            lines.append(",".join(row))
        lines.append(",".join(_text(value) for value in row.values()))
    replace_text(path, "".join(line + "\n" for line in lines))


def _text(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class StudyTable:
    """Contents of a CSV file that `write_csv` wrote."""

    def __init__(self, path: Path) -> None:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self._rows: dict[Cell, list[dict[str, str]]] = {}
        for row in rows:
            cell = Cell(row["arm"], int(row["updates_per_step"]), int(row["seed"]))
            self._rows.setdefault(cell, []).append(row)

    def cells(self, arm: str, updates_per_step: int) -> list[Cell]:
        """Return the cells of an arm at a staleness, one for each seed."""
        return [cell for cell in self._rows if (cell.arm, cell.updates_per_step) == (arm, updates_per_step)]

    def column(self, cell: Cell, name: str) -> np.ndarray:
        """Return a cell's column as float64, NaN where the table is empty."""
        return np.array([float(row[name] or "nan") for row in self._rows[cell]])

    def final(self, cells: Sequence[Cell], name: str, num_updates: int) -> np.ndarray:
        """Return each cell's mean over its last `num_updates` updates, [cells]."""
        means = []
        for cell in cells:
            update, values = self.column(cell, "update"), self.column(cell, name)
            means.append(np.nanmean(values[update > update.max() - num_updates]))
        return np.array(means)

    def window_means(self, cells: Sequence[Cell], name: str, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the last update of each window of `window` updates, [windows], and the means, [cells, windows].

        A per-step metric counts only in the window of the step's first update.
        """
        num_windows = max(int(self.column(cell, "update").max()) for cell in cells) // window
        means = np.full((len(cells), num_windows), np.nan)
        for index, cell in enumerate(cells):
            update, values = self.column(cell, "update"), self.column(cell, name)
            for number in range(num_windows):
                inside = (update > number * window) & (update <= (number + 1) * window) & ~np.isnan(values)
                if inside.any():
                    means[index, number] = values[inside].mean()
        return window * np.arange(1, num_windows + 1), means
