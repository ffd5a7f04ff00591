"""Configuration of a study and the runs that it expands to.

A study trains every arm at every number of updates per rollout batch with every seed, for equally many updates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError

from megatron_bapo.config.checks import check_config
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config, Section
from megatron_bapo.controller.run_state import check_resumable
from megatron_bapo.errors import UserError
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.studies.table import Cell

Overrides = dict[str, Any]
"""Part of a run's configuration, with the same nesting."""


class Arm(Section):
    label: str
    overrides: Overrides = Field(default_factory=dict)
    updates_per_step: tuple[PositiveInt, ...] | None = None
    """Updates per step of this arm; by default those of the study."""


class Figure(Section):
    kind: Literal["curves", "ratio_boxes", "token_scatter"]
    title: str
    arms: tuple[str, ...]
    updates_per_step: tuple[PositiveInt, ...]
    panels: dict[str, str] = Field(default_factory=dict)
    """Panels of a figure of kind `curves`: maps a column to its label."""


class Study(Section):
    run_dir: Path
    """Folder that contains one folder per run."""
    output: Path
    """Folder of the tables and figures."""
    base: Path
    seeds: tuple[int, ...]
    updates_per_step: tuple[PositiveInt, ...]
    num_updates: PositiveInt
    """Optimizer updates of every run, counted from its start."""
    common: Overrides = Field(default_factory=dict)
    start: Overrides = Field(default_factory=dict)
    continued: Overrides = Field(default_factory=dict)
    arms: dict[str, Arm]
    columns: dict[str, str]
    """Maps a column of the table to a metric."""
    tokens_of: dict[str, tuple[PositiveInt, ...]] = Field(default_factory=dict)
    """Maps an arm to the updates per step of the runs whose sampled tokens go to tokens.csv."""
    window: PositiveInt
    """Number of updates that are averaged into one point of a curve."""
    final_updates: PositiveInt
    """Number of last updates that the summary averages."""
    summary: tuple[str, ...]
    """Columns of the summary."""
    figures: dict[str, Figure]


@dataclass(frozen=True, eq=False)
class StudyRun:
    """One run of the study."""

    name: str
    config: Config
    num_updates: int
    needs: str | None = None
    """Name of the run whose exported model this run starts from."""
    cell: Cell | None = None
    """Arm, staleness and seed of the run; None for a start run."""

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.config.run_dir)

    @property
    def log(self) -> Path:
        return self.directory.logs / "study.log"

    @property
    def finished(self) -> Path:
        """Marker file that exists once the run has finished successfully."""
        return self.config.run_dir / "finished"

    def checkable(self, runs: Sequence[StudyRun]) -> Config:
        """Return the configuration with the model of the run in `needs`, whose export may not exist yet."""
        models = [run.config.model for run in runs if run.name == self.needs]
        return self.config.model_copy(update={"model": models[0]}) if models else self.config

    def num_updates_done(self) -> int:
        if self.finished.exists():
            return self.num_updates
        path = self.directory.updates if self.needs else self.directory.metrics
        return min(path.read_bytes().count(b"\n"), self.num_updates) if path.exists() else 0


def load_study(path: Path) -> Study:
    """Load a study. Raises UserError that lists all problems."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the study {path}: {error}") from None
    try:
        study = Study.model_validate(document)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)]
        raise UserError("\n".join([f"{path}: the study's keys are {', '.join(Study.model_fields)}", *lines])) from None
    if problems := list(_problems(study)):
        raise UserError("\n".join([f"{path}: {len(problems)} problems", *(f"  {problem}" for problem in problems)]))
    return study


def _problems(study: Study) -> Iterator[str]:
    """Yield the rules that the study breaks across keys."""
    for updates in study.updates_per_step:
        if study.num_updates % updates:
            yield (
                f"num_updates={study.num_updates} must be a multiple of updates_per_step={updates}: all runs take "
                f"equally many updates"
            )
    for name, arm in study.arms.items():
        for updates in set(arm.updates_per_step or ()) - set(study.updates_per_step):
            yield f"arms.{name}.updates_per_step={updates} must be one of the study's, {list(study.updates_per_step)}"
    for name in study.tokens_of:
        if name not in study.arms:
            yield f"tokens_of.{name}: no such arm; there are {', '.join(study.arms)}"
    for column in set(study.summary) - set(study.columns):
        yield f"summary: no such column {column}; there are {', '.join(study.columns)}"
    for name, figure in study.figures.items():
        for arm in set(figure.arms) - set(study.arms):
            yield f"figures.{name}: no such arm {arm}; there are {', '.join(study.arms)}"
        for column in set(figure.panels) - set(study.columns):
            yield f"figures.{name}: no such column {column}; there are {', '.join(study.columns)}"


def expand(study: Study) -> list[StudyRun]:
    """Return all runs: first the start runs, then in order of `updates_per_step`, seed and arm.

    Raises UserError if the configuration of a run is invalid.
    """
    starts = [_start(study, seed) for seed in study.seeds]
    return starts + [
        _continued(study, start, name, arm, updates)
        for updates in study.updates_per_step
        for start in starts
        for name, arm in study.arms.items()
        if updates in (arm.updates_per_step or study.updates_per_step)
    ]


def _start(study: Study, seed: int) -> StudyRun:
    name = f"start-seed{seed}"
    fixed = {"seed": seed, "run_dir": str(study.run_dir / name), "trainer": {"total_steps": 0}}
    config = _config(study, study.start, fixed)
    return StudyRun(name, config, config.warm_start.num_steps if config.warm_start else 0)


def _continued(study: Study, start: StudyRun, arm_name: str, arm: Arm, updates: int) -> StudyRun:
    name = f"{arm_name}-{updates}x-seed{start.config.seed}"
    fixed = {
        "seed": start.config.seed,
        "run_dir": str(study.run_dir / name),
        "model": {"create": None, "path": str(start.directory.export)},
        "warm_start": None,
        "trainer": {
            "total_steps": study.num_updates // updates,
            "train_batch_size": start.config.trainer.ppo_mini_batch_size * updates,
        },
    }
    return StudyRun(
        name,
        _config(study, study.continued, arm.overrides, fixed),
        study.num_updates,
        start.name,
        Cell(arm_name, updates, start.config.seed),
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
            check_resumable(run.config, run.directory)
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None
