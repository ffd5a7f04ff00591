"""Runs of a study.

A study trains its arms on two axes, the number of updates per rollout batch and its variants, with several seeds, for
equally many updates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bapo.config.checks import check_config
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.run_state import check_resumable
from megatron_bapo.errors import UserError
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.studies.study import BOUNDS_COLUMNS, Study
from megatron_bapo.studies.table import Cell, StudyTable, read_table, update_rows


@dataclass(frozen=True, eq=False)
class StudyRun:
    """One run of the study."""

    name: str
    config: Config
    """Configuration; that of a run with `bounds_of` has bounds that `final_config` replaces."""
    num_updates: int
    needs: str | None = None
    """Name of the run whose exported model this run starts from."""
    cell: Cell | None = None
    """Arm, variant, staleness and seed of the run; None for a start run."""
    recorded: StudyTable | None = None
    """Table that has the run's results already."""
    bounds_of: StudyRun | None = None
    """Run whose mean clip bounds are the fixed bounds of this run."""

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.config.run_dir)

    @property
    def log(self) -> Path:
        return self.directory.logs / "study.log"

    @property
    def marker(self) -> Path:
        """Marker file that exists once the run has finished successfully in its run directory."""
        return self.config.run_dir / "finished"

    @property
    def finished(self) -> bool:
        """Whether the run has finished, here or, if the table has its results, elsewhere."""
        return self.recorded is not None or self.marker.exists()

    def mean_bounds(self) -> tuple[float, float]:
        """Return the means over the updates of the (lower, upper) clip bound of a finished run, to three decimals."""
        assert self.cell is not None, "start runs have no bounds"
        if self.recorded is not None:
            columns = [self.recorded.column(self.cell, name) for name in BOUNDS_COLUMNS]
        else:
            names = {name: f"actor/bapo_{name}" for name in BOUNDS_COLUMNS}
            rows = update_rows(self.cell, self.config.run_dir, names)
            columns = [np.array([row[name] for row in rows], dtype=float) for name in BOUNDS_COLUMNS]
        low, high = (round(float(np.nanmean(column)), 3) for column in columns)
        return low, high

    def final_config(self) -> Config:
        """Return the configuration to run; the run in `bounds_of` must have finished."""
        if self.bounds_of is None:
            return self.config
        low, high = self.bounds_of.mean_bounds()
        clip = {"clip_ratio_low": round(1.0 - low, 3), "clip_ratio_high": round(high - 1.0, 3)}
        return self.config.model_copy(update={"algorithm": self.config.algorithm.model_copy(update=clip)})

    def checkable(self, runs: Sequence[StudyRun]) -> Config:
        """Return the configuration with the model of the run in `needs`, whose export may not exist yet."""
        models = [run.config.model for run in runs if run.name == self.needs]
        return self.config.model_copy(update={"model": models[0]}) if models else self.config

    def num_updates_done(self) -> int:
        if self.finished:
            return self.num_updates
        path = self.directory.updates if self.needs else self.directory.metrics
        return min(path.read_bytes().count(b"\n"), self.num_updates) if path.exists() else 0


def expand(study: Study) -> list[StudyRun]:
    """Return all runs in the order in which they are executed; the start run of a seed precedes the others of it.

    Raises UserError if the configuration of a run is invalid.
    """
    table = read_table(study.output / "updates.csv")
    starts = {seed: _start(study, seed) for seed in study.seeds}
    runs: dict[Cell | int, StudyRun] = {}
    for cell in study.cells():
        runs.setdefault(cell.seed, starts[cell.seed])
        source = study.arms[cell.arm].bounds_of
        bounds_of = None if source is None else runs.get(cell.of_arm(source))
        if source is not None and bounds_of is None:
            raise UserError(
                f"arms.{cell.arm}.bounds_of={source}: the run {cell.name} needs {cell.of_arm(source).name}, which "
                "is not among the runs before it; add it to a block of `order` before"
            )
        runs[cell] = _continued(study, starts[cell.seed], cell, table, bounds_of)
    return list(runs.values())


def unfinished(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Return the runs to execute; of the start runs, those that an unfinished run needs."""
    continued = [run for run in runs if run.cell is not None and not run.finished]
    needed = {run.needs for run in continued}
    return [run for run in runs if not run.finished and (run.cell is not None or run.name in needed)]


def _start(study: Study, seed: int) -> StudyRun:
    name = f"start-seed{seed}"
    fixed = {"seed": seed, "run_dir": str(study.run_dir / name), "trainer": {"total_steps": 0}}
    config = _config(study, study.start, fixed)
    return StudyRun(name, config, config.warm_start.num_steps if config.warm_start else 0)


def _continued(
    study: Study, start: StudyRun, cell: Cell, table: StudyTable | None, bounds_of: StudyRun | None
) -> StudyRun:
    fixed = {
        "seed": cell.seed,
        "run_dir": str(study.run_dir / cell.name),
        "model": {"create": None, "path": str(start.directory.export)},
        "warm_start": None,
        "trainer": {
            "total_steps": study.num_updates // cell.updates_per_step,
            "train_batch_size": start.config.trainer.ppo_mini_batch_size * cell.updates_per_step,
        },
    }
    return StudyRun(
        cell.name,
        _config(study, study.continued, study.variants[cell.variant], study.arms[cell.arm].overrides, fixed),
        study.num_updates,
        start.name,
        cell,
        table if table is not None and table.has(cell) else None,
        bounds_of,
    )


def _config(study: Study, *layers: Mapping[str, Any]) -> Config:
    return load_config(study.base, [line for layer in (study.common, *layers) for line in _dotted(layer)])


def _dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield nested values as KEY=VALUE overrides."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"


def check_runs(runs: Sequence[StudyRun]) -> None:
    """Check all runs. Raises UserError if a run breaks a rule or its folder has another configuration."""
    for run in runs:
        try:
            check_config(run.checkable(runs))
            if run.bounds_of is None or run.bounds_of.finished:
                check_resumable(run.final_config(), run.directory)
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None
