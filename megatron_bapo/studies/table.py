"""CSV table of a study's runs with one row per optimizer update."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_bapo.files import replace_text
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.metrics.token_table import COLUMNS, read_token_tables


@dataclass(frozen=True)
class Cell:
    """One arm of a study in one variant, at one staleness, with one seed."""

    arm: str
    updates_per_step: int
    seed: int
    variant: str = ""

    @property
    def name(self) -> str:
        """Name of the cell's run."""
        return "-".join(part for part in (self.arm, self.variant, f"{self.updates_per_step}x-seed{self.seed}") if part)

    def columns(self) -> dict[str, str | int]:
        variant = {"variant": self.variant} if self.variant else {}
        return {"arm": self.arm, **variant, "updates_per_step": self.updates_per_step, "seed": self.seed}

    def of_arm(self, arm: str) -> Cell:
        """Return the cell of another arm that is paired with this one."""
        return replace(self, arm=arm)


Row = Mapping[str, str | int | float | None]


def update_rows(cell: Cell, run_dir: Path, columns: Mapping[str, str]) -> list[Row]:
    """Return the rows of one run; `columns` maps a column to its metric, or to `time_s`, the seconds of the run so far.

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
        metrics = {"time_s": row["time_s"], **row["metrics"]}
        for column, name in columns.items():
            if values[column] is None:
                values[column] = metrics.get(name)
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
    written = list(rows)
    header = dict.fromkeys(name for row in written for name in row)
    lines = [",".join(header), *(",".join(_text(row.get(name)) for name in header) for row in written)]
    replace_text(path, "".join(line + "\n" for line in lines if line))


def _text(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class StudyTable:
    """Contents of a CSV file that `write_csv` wrote."""

    def __init__(self, path: Path) -> None:
        self._rows: dict[Cell, list[dict[str, str]]] = {}
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                cell = Cell(row["arm"], int(row["updates_per_step"]), int(row["seed"]), row.get("variant", ""))
                self._rows.setdefault(cell, []).append(row)

    def has(self, cell: Cell) -> bool:
        return cell in self._rows

    def every_cell(self) -> list[Cell]:
        return list(self._rows)

    def rows(self, cell: Cell) -> list[dict[str, str]]:
        return self._rows.get(cell, [])

    def cells(self, arm: str, updates_per_step: int, variant: str = "") -> list[Cell]:
        """Return the cells of an arm in a variant at a staleness, one for each seed."""
        wanted = (arm, updates_per_step, variant)
        return [cell for cell in self._rows if (cell.arm, cell.updates_per_step, cell.variant) == wanted]

    def column(self, cell: Cell, name: str) -> np.ndarray:
        """Return a cell's column as float64, NaN where the table is empty."""
        return np.array([float(row.get(name) or "nan") for row in self._rows[cell]])

    def last(self, cell: Cell, name: str) -> float:
        """Return the last value of a cell's column; NaN if it has none."""
        values = self.column(cell, name)
        known = values[~np.isnan(values)]
        return float(known[-1]) if len(known) else float("nan")

    def final(self, cells: Sequence[Cell], name: str, num_updates: int) -> np.ndarray:
        """Return each cell's mean over its last `num_updates` updates, [cells]; NaN if none of them has a value."""
        means = []
        for cell in cells:
            update, values = self.column(cell, "update"), self.column(cell, name)
            known = values[(update > update.max() - num_updates) & ~np.isnan(values)]
            means.append(known.mean() if len(known) else np.nan)
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


def read_table(path: Path) -> StudyTable | None:
    """Return the table in `path`, or None if there is none."""
    return StudyTable(path) if path.exists() else None
