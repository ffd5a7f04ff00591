"""Configuration of a study: arms, the axes that they are run on, and what is made of the results."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt

from megatron_bapo.config.loading import load_section
from megatron_bapo.config.section import Fraction, Section
from megatron_bapo.errors import UserError
from megatron_bapo.metrics.plots import PALETTE
from megatron_bapo.studies.table import Cell

Overrides = dict[str, Any]
"""Part of a run's configuration, with the same nesting."""
BOUNDS_COLUMNS = ("clip_low", "clip_high")
"""Columns with the clip bounds of each update, which an arm with `bounds_of` takes the means of."""


class Arm(Section):
    label: str
    overrides: Overrides = Field(default_factory=dict)
    updates_per_step: tuple[PositiveInt, ...] | None = None
    """Updates per step of this arm; by default those of the study."""
    bounds_of: str | None = None
    """Arm whose mean clip bounds are the fixed bounds of this arm: each run takes those of the run with the same
    variant, staleness and seed, and starts after it."""


class Block(Section):
    """All combinations of some values of each axis. An axis that is not given has all values of the study."""

    arms: tuple[str, ...] | None = None
    variants: tuple[str, ...] | None = None
    updates_per_step: tuple[PositiveInt, ...] | None = None
    seeds: tuple[int, ...] | None = None

    def contains(self, cell: Cell) -> bool:
        values = (cell.arm, cell.variant, cell.updates_per_step, cell.seed)
        axes = (self.arms, self.variants, self.updates_per_step, self.seeds)
        return all(axis is None or value in axis for axis, value in zip(axes, values, strict=True))


class Figure(Section):
    kind: Literal["curves", "ratio_boxes", "token_scatter", "map", "differences"]
    title: str
    arms: tuple[str, ...]
    updates_per_step: tuple[PositiveInt, ...]
    variants: tuple[str, ...] | None = None
    """Variants that are shown; by default those of the study."""
    panels: dict[str, str] = Field(default_factory=dict)
    """Panels of a figure of kind `curves`: maps a column to its label. A figure of kind `map` shows one column."""


class Statistics(Section):
    """Comparisons of arms, paired by seed, on the column `outcome` at the end of a run."""

    outcome: str
    reference: dict[str, tuple[str, ...]]
    """Maps a reference arm to the arms that are compared with it, in every variant and at every staleness that both
    have run in."""
    level: Fraction = 0.95
    """Level of the bootstrap intervals."""
    num_resamples: PositiveInt = 10_000
    diverged: float | None = None
    """Outcome that a run counts with if it has none in its last step because it diverged to NaN, such as 0 for an
    accuracy. Without it such a run is refused: leaving it out would favour the arm that diverges."""


class Collapse(Section):
    """Criteria of the collapse of a run."""

    accuracy: str
    """Column of the held-out accuracy: the run has collapsed if it falls below half of its best value."""
    entropy: str
    """Column of the entropy: the run has collapsed if the mean over a window falls below a tenth of the mean over the
    first window, or rises above twice that, or if a step has no entropy, which is how NaN is written. With
    `trainer.skip_zero_advantage` a step whose groups are all uniform has no entropy either."""


class Study(Section):
    run_dir: Path
    """Folder that contains one folder per run."""
    output: Path
    """Folder of the tables and figures. A run whose cell is in its updates.csv is finished."""
    base: Path
    seeds: tuple[int, ...]
    updates_per_step: tuple[PositiveInt, ...]
    variants: dict[str, Overrides] = Field(default_factory=lambda: {"": {}})
    """A second axis beside `updates_per_step`: maps a name to settings that override `continued`."""
    num_updates: PositiveInt
    """Optimizer updates of every run, counted from its start."""
    common: Overrides = Field(default_factory=dict)
    start: Overrides = Field(default_factory=dict)
    continued: Overrides = Field(default_factory=dict)
    arms: dict[str, Arm]
    order: tuple[Block, ...] = (Block(),)
    """Runs of the study: those of the first block, then those of the next one that it has not had, and so on."""
    quick: Block | None = None
    """Runs of `--quick`."""
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
    statistics: Statistics | None = None
    collapse: Collapse | None = None
    figures: dict[str, Figure]

    def cells(self) -> list[Cell]:
        """Return the cells in the order in which they are run."""
        every = [
            Cell(arm, updates, seed, variant)
            for variant in self.variants
            for updates in self.updates_per_step
            for seed in self.seeds
            for arm in self.arms
            if updates in (self.arms[arm].updates_per_step or self.updates_per_step)
        ]
        return list(dict.fromkeys(cell for block in self.order for cell in every if block.contains(cell)))

    def quick_study(self) -> Study:
        """Return the study with the runs of `quick` alone, which knows nothing of the results of the whole study.

        Raises UserError if the study has no such runs.
        """
        if self.quick is None:
            raise UserError("--quick: the study has no key `quick` that says which of its runs to repeat")
        folder = self.run_dir.with_name(f"{self.run_dir.name}_quick")
        return self.model_copy(update={"order": (self.quick,), "run_dir": folder, "output": folder / "results"})


def load_study(path: Path) -> Study:
    """Load a study. Raises UserError that lists all problems."""
    study = load_section(Study, path)
    if problems := list(_problems(study)):
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise UserError("\n".join([f"{path}: {count}", *(f"  {problem}" for problem in problems)]))
    return study


def _problems(study: Study) -> Iterator[str]:
    """Yield the rules that the study breaks across keys."""
    for updates in study.updates_per_step:
        if study.num_updates % updates:
            yield (
                f"num_updates={study.num_updates} must be a multiple of updates_per_step={updates}: all runs take "
                f"equally many updates"
            )
    if study.window > study.num_updates:
        yield f"window={study.window} must be at most num_updates={study.num_updates}, or no curve has a point"
    for name, arm in study.arms.items():
        for updates in set(arm.updates_per_step or ()) - set(study.updates_per_step):
            yield f"arms.{name}.updates_per_step={updates} must be one of the study's, {list(study.updates_per_step)}"
        if arm.bounds_of is not None:
            yield from _unknown(f"arms.{name}.bounds_of", "arm", [arm.bounds_of], study.arms)
            yield from _unknown(f"arms.{name}.bounds_of", "column", BOUNDS_COLUMNS, study.columns)
    yield from _unknown("tokens_of", "arm", study.tokens_of, study.arms)
    for arm, updates_per_step in study.tokens_of.items():
        yield from _unknown(f"tokens_of.{arm}", "updates_per_step", updates_per_step, study.updates_per_step)
    yield from _unknown("summary", "column", study.summary, study.columns)
    for name, figure in study.figures.items():
        yield from _figure_problems(study, f"figures.{name}", figure)
    blocks = {f"order[{number}]": block for number, block in enumerate(study.order)}
    if study.quick is not None:
        blocks["quick"] = study.quick
    for place, block in blocks.items():
        yield from _unknown_axes(study, place, block)
        yield from _unknown(place, "seed", block.seeds or (), study.seeds)
    if study.statistics is not None:
        yield from _unknown("statistics.outcome", "column", [study.statistics.outcome], study.columns)
        for reference, arms in study.statistics.reference.items():
            yield from _unknown("statistics.reference", "arm", [reference, *arms], study.arms)
    if study.collapse is not None:
        yield from _unknown("collapse", "column", [study.collapse.accuracy, study.collapse.entropy], study.columns)


def _figure_problems(study: Study, place: str, figure: Figure) -> Iterator[str]:
    """Yield why the figure cannot be plotted once all runs have finished."""
    yield from _unknown_axes(study, place, figure)
    yield from _unknown(place, "column", figure.panels, study.columns)
    column = next(iter(study.columns), "reward")
    block = Block(arms=figure.arms, variants=figure.variants, updates_per_step=figure.updates_per_step)
    shown = dict.fromkeys((c.arm, c.updates_per_step, c.variant) for c in study.cells() if block.contains(c))
    match figure.kind:
        case "curves":
            if not figure.panels:
                yield f"{place}.panels is empty; name a column for each panel, such as {column}"
            if len(shown) > len(PALETTE):
                yield (
                    f"{place}: {len(shown)} curves cannot be told apart with {len(PALETTE)} colours; give fewer arms, "
                    "variants or updates_per_step"
                )
        case "map":
            if len(figure.panels) != 1:
                yield f"{place}.panels names {len(figure.panels)} columns, but a map shows one, such as {column}"
        case "differences":
            compared = {arm for arms in study.statistics.reference.values() for arm in arms} if study.statistics else ()
            if not set(figure.arms) & set(compared):
                yield f"{place}: `statistics` compares none of its arms; add one of them to statistics.reference"
        case "ratio_boxes" | "token_scatter":
            for arm, updates in dict.fromkeys((arm, updates) for arm, updates, _ in shown):
                if updates not in study.tokens_of.get(arm, ()):
                    yield f"{place}: tokens_of has no {arm} with {updates} updates per step; add them there"


def _unknown_axes(study: Study, place: str, given: Block | Figure) -> Iterator[str]:
    yield from _unknown(place, "arm", given.arms or (), study.arms)
    yield from _unknown(place, "variant", given.variants or (), study.variants)
    yield from _unknown(place, "updates_per_step", given.updates_per_step or (), study.updates_per_step)


def _unknown(place: str, kind: str, given: Collection[Any], known: Collection[Any]) -> Iterator[str]:
    for value in dict.fromkeys(given):
        if value not in known:
            yield f"{place}: no such {kind} {value}; there are {', '.join(map(str, known))}"
