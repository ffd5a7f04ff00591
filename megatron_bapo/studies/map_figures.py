"""Figures of a study over all its cells: a map of the results, and differences with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from megatron_bapo.metrics.plots import PALETTE, STYLE
from megatron_bapo.studies.figures import grid
from megatron_bapo.studies.statistics import Comparison
from megatron_bapo.studies.table import Cell, StudyTable

BACKGROUND = "white"
FEWEST_SEEDS = 3
"""Number of pairs from which a difference is drawn as a full marker."""


@dataclass(frozen=True)
class Panel:
    """One arm of a map."""

    title: str
    arm: str


def map_figure(
    table: StudyTable,
    panels: Sequence[Panel],
    variants: Sequence[str],
    updates_per_step: Sequence[int],
    column: str,
    title: str,
    collapsed: Callable[[Cell], bool],
) -> Figure:
    """Plot one panel per arm with a field for each variant (row) and staleness (column).

    A field has the mean over seeds of the last value of `column`, the number of seeds, and the number of collapsed
    runs if there are any. A field without a run is empty.
    """
    cells = {
        (panel.arm, variant, updates): table.cells(panel.arm, updates, variant)
        for panel in panels
        for variant in variants
        for updates in updates_per_step
    }
    means = {key: float(np.mean([table.last(c, column) for c in found])) for key, found in cells.items() if found}
    low, high = min(means.values()), max(means.values())
    with rc_context(STYLE):
        num_columns = min(len(panels), 4)
        figure, axes = grid(-(-len(panels) // num_columns), num_columns, title, size=(2.9, 0.5 * len(variants) + 1.3))
        colours = LinearSegmentedColormap.from_list("map", [BACKGROUND, PALETTE[0]])
        for axis, panel in zip(axes, panels, strict=False):
            values = np.array([[means.get((panel.arm, v, u), np.nan) for u in updates_per_step] for v in variants])
            axis.imshow(values, cmap=colours, vmin=low, vmax=max(high, low + 1e-9), aspect="auto")
            for row, variant in enumerate(variants):
                for place, updates in enumerate(updates_per_step):
                    _field(axis, place, row, values[row, place], cells[panel.arm, variant, updates], collapsed)
            axis.set_xticks(range(len(updates_per_step)), [str(updates) for updates in updates_per_step])
            axis.set_yticks(range(len(variants)), list(variants))
            axis.set_xlabel("updates per rollout batch")
            axis.grid(visible=False)
            axis.set_title(panel.title, loc="left", fontsize=10.5, color=STYLE["axes.labelcolor"])
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
    return figure


def differences_figure(comparisons: Sequence[Comparison], labels: Mapping[str, str], title: str) -> Figure:
    """Plot each difference with its bootstrap interval; hollow markers have fewer than three pairs."""
    with rc_context(STYLE):
        figure, (axis,) = grid(1, 1, title, size=(8.6, 0.27 * len(comparisons) + 0.8))
        for row, c in enumerate(comparisons):
            colour = PALETTE[0] if c.updates_per_step is None else PALETTE[1]
            style: dict[str, Any] = {} if c.num_pairs >= FEWEST_SEEDS else {"markerfacecolor": BACKGROUND}
            axis.plot([c.low, c.high], [row, row], color=colour, linewidth=1.6)
            axis.plot([c.mean], [row], marker="o", markersize=5, color=colour, **style)
        axis.axvline(0.0, color=STYLE["text.color"], linewidth=1.0)
        axis.set_yticks(range(len(comparisons)), [_line(c, labels) for c in comparisons])
        axis.set_ylim(len(comparisons) - 0.5, -0.5)
        axis.set_xlabel("difference of the final held-out accuracy")
    return figure


def _field(
    axis: Axes, place: int, row: int, value: float, cells: Sequence[Cell], collapsed: Callable[[Cell], bool]
) -> None:
    if not cells:
        axis.text(place, row, "not run", ha="center", va="center", fontsize=7, color=STYLE["axes.labelcolor"])
        return
    num_collapsed = sum(map(collapsed, cells))
    seeds = f"{len(cells)} seed{'s' if len(cells) > 1 else ''}"
    lost = f"\n{num_collapsed} collapsed" if num_collapsed else ""
    axis.text(place, row - 0.2, f"{value:.2f}", ha="center", va="center", fontsize=9)
    axis.text(place, row + 0.2, seeds + lost, ha="center", va="center", fontsize=6, linespacing=1.1)


def _line(c: Comparison, labels: Mapping[str, str]) -> str:
    where = "all cells" if c.updates_per_step is None else f"{c.variant} {c.updates_per_step} updates".strip()
    return f"{labels[c.arm]} − {labels[c.reference]}, {where} ({c.num_pairs})"
