"""Figures of a study, plotted from its tables in the project's style."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_bapo.metrics.plots import PALETTE, STYLE
from megatron_bapo.studies.table import Cell, StudyTable

NEGATIVE, POSITIVE = PALETTE[1], PALETTE[0]
PANEL_SIZE = (3.9, 2.7)
DPI = 110


@dataclass(frozen=True)
class Curve:
    """One arm in one variant at one staleness over all seeds."""

    label: str
    arm: str
    updates_per_step: int
    variant: str = ""


def curves_figure(
    table: StudyTable, curves: Sequence[Curve], panels: Mapping[str, str], title: str, window: int
) -> Figure:
    """Plot one panel for each entry of `panels`, which maps a column to its label.

    Each point is the mean over a window of updates and over seeds; bands are one standard deviation over seeds.
    """
    with rc_context(STYLE):
        num_columns = min(len(panels), 2)
        figure, axes = grid(-(-len(panels) // num_columns), num_columns, title)
        for panel, (column, label) in zip(axes, panels.items(), strict=False):
            panel.set_title(label, loc="left", fontsize=10.5, color=STYLE["axes.labelcolor"], pad=7)
            panel.set_xlabel("updates")
            for index, curve in enumerate(curves):
                _band(panel, table, curve, column, window, PALETTE[index])
        for panel in axes[len(panels) :]:
            panel.set_visible(False)
        if len(curves) > 1:
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower left", ncols=4)
    return figure


def ratio_boxes_figure(tokens: StudyTable, cells: Sequence[Cell], title: str) -> Figure:
    """Plot token probability by ratio: A < 0 for ratios below 1 and A > 0 above (the paper's Figure 5).

    Boxes span the first to the third quartile, whiskers the 5th to the 95th percentile. Tick labels show the number of
    tokens.
    """
    ratio, prob, _, sign = _tokens(tokens, cells)
    below, above = np.arange(0.0, 1.0, 0.2), np.arange(1.0, 2.01, 0.2)
    with rc_context(STYLE):
        figure, axes = grid(1, 2, title)
        for panel, starts, wanted, colour, name in (
            (axes[0], below, -1, NEGATIVE, "A < 0"),
            (axes[1], above, 1, POSITIVE, "A > 0"),
        ):
            ends = np.append(starts[1:], 1.0 if wanted < 0 else np.inf)
            groups = [prob[(sign == wanted) & (ratio >= a) & (ratio < b)] for a, b in zip(starts, ends, strict=True)]
            labels = [
                f"{a:.1f}–{b:.1f}\n{len(group)}" if np.isfinite(b) else f"≥ {a:.1f}\n{len(group)}"
                for a, b, group in zip(starts, ends, groups, strict=True)
            ]
            _boxes(panel, groups, labels, colour)
            panel.set_title(f"token probability, {name}", loc="left", fontsize=10.5, color=STYLE["axes.labelcolor"])
            panel.set_xlabel("ratio, number of tokens")
            panel.set_ylim(-0.02, 1.02)
    return figure


def token_scatter_figure(tokens: StudyTable, cells: Sequence[Cell], title: str) -> Figure:
    """Plot probability, ratio and entropy of tokens in 3D and in two projections (the paper's Figure 10)."""
    ratio, prob, entropy, sign = _tokens(tokens, cells)
    order = np.random.default_rng(0).permutation(len(ratio))[:3000]
    ratio, prob, entropy, sign = ratio[order], prob[order], entropy[order], sign[order]
    shown = np.clip(ratio, 0.0, 3.0)
    colours = np.where(sign > 0, POSITIVE, NEGATIVE)
    percentile = float(np.percentile(entropy, 80))
    dots: dict[str, Any] = {"c": colours, "s": 5, "alpha": 0.45, "linewidths": 0}
    with rc_context(STYLE):
        figure = Figure(figsize=(12.0, 3.9), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        space: Any = figure.add_subplot(1, 3, 1, projection="3d")
        space.scatter(prob, shown, entropy, depthshade=False, **dots)
        space.set_xlabel("probability")
        space.set_ylabel("ratio")
        space.set_zlabel("entropy, nats")
        flat, other = figure.add_subplot(1, 3, 2), figure.add_subplot(1, 3, 3)
        flat.scatter(shown, prob, **dots)
        flat.set_xlabel("ratio (above 3: at 3)")
        flat.set_title("probability", loc="left", fontsize=10.5, color=STYLE["axes.labelcolor"])
        other.scatter(prob, entropy, **dots)
        other.axhline(percentile, color=STYLE["text.color"], linewidth=1.1, dashes=(4, 3))
        flat.plot(
            [], [], color=STYLE["text.color"], linewidth=1.1, dashes=(4, 3), label="80th percentile of the entropy"
        )
        other.set_xlabel("probability")
        other.set_title("entropy, nats", loc="left", fontsize=10.5, color=STYLE["axes.labelcolor"])
        for name, colour in (("A > 0", POSITIVE), ("A < 0", NEGATIVE)):
            flat.scatter([], [], c=colour, s=20, label=name)
        figure.legend(*flat.get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return figure


def save_png(figure: Figure, path: Path) -> None:
    """Write the figure as PNG; the same figure gives the same bytes."""
    with rc_context(STYLE):
        figure.savefig(path, dpi=DPI, metadata={"Software": None})


def grid(
    num_rows: int, num_columns: int, title: str, size: tuple[float, float] = PANEL_SIZE
) -> tuple[Figure, list[Axes]]:
    """Return a figure with its panels, row by row; `size` is that of a panel in inches."""
    width, height = size[0] * num_columns, size[1] * num_rows + 0.7
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure, [figure.add_subplot(num_rows, num_columns, 1 + index) for index in range(num_rows * num_columns)]


def _band(panel: Axes, table: StudyTable, curve: Curve, column: str, window: int, colour: str) -> None:
    x, values = table.window_means(table.cells(curve.arm, curve.updates_per_step, curve.variant), column, window)
    known = ~np.isnan(values).any(0)
    x, values = x[known], values[:, known]
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(x))
    panel.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.16, linewidth=0)
    panel.plot(x, mean, color=colour, label=curve.label)


def _boxes(panel: Axes, groups: Sequence[np.ndarray], labels: Sequence[str], colour: str) -> None:
    boxes: list[dict[str, Any]] = [
        dict(zip(("whislo", "q1", "med", "q3", "whishi"), np.percentile(group, (5, 25, 50, 75, 95)), strict=True))
        if len(group)
        else dict.fromkeys(("whislo", "q1", "med", "q3", "whishi"), np.nan)
        for group in groups
    ]
    line = {"color": colour, "linewidth": 1.2}
    panel.bxp(
        boxes,
        showfliers=False,
        patch_artist=True,
        widths=0.6,
        boxprops={"facecolor": colour, "alpha": 0.35, "edgecolor": colour},
        whiskerprops=line,
        capprops=line,
        medianprops={"color": STYLE["text.color"], "linewidth": 1.4},
    )
    panel.set_xticks(range(1, len(labels) + 1), labels)


def _tokens(tokens: StudyTable, cells: Sequence[Cell]) -> list[np.ndarray]:
    """Return ratio, probability, entropy and advantage sign of the tokens of all cells."""
    columns = [
        np.concatenate([tokens.column(cell, name) for cell in cells])
        for name in ("log_ratio", "prob", "entropy", "advantage_sign")
    ]
    return [np.exp(columns[0]), *columns[1:]]
