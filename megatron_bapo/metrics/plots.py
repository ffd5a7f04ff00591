"""The project's figure style, and curves as deterministic SVG text."""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# Okabe and Ito's colour-blind-safe palette, "Color Universal Design" (2008), without black and yellow.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")

MAX_POINTS = 600
"""Points of a curve, at most."""

_INK, _QUIET, _GRID = "#33383D", "#6B7278", "#E7E9EB"
_FEW_POINTS = 16
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
"""Line styles, each for as many curves as the palette has colours."""
_WIDTH_IN, _HEIGHT_IN, _AXES_HEIGHT_IN = 5.6, 3.0, 2.5
"""Size of a figure; one with a high legend is higher, so that its axes lose no more than a row to it."""
_LINE = 55
"""Characters of a name that fit on a line."""
_STRIPE = 4.0
"""Length of a stripe in widths of the line."""
_SAME = 0.005
"""Share of the range of all values by which curves that coincide may differ."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "text.color": _INK,
    "text.parse_math": False,
    "axes.labelcolor": _QUIET,
    "axes.edgecolor": "#C9CDD1",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "grid.linewidth": 0.9,
    "xtick.color": "#C9CDD1",
    "xtick.labelcolor": _QUIET,
    "ytick.labelcolor": _QUIET,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "legend.frameon": False,
    "legend.handlelength": 1.1,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.4,
    "legend.borderpad": 0.35,
    "legend.borderaxespad": 0.2,
}


@dataclass(frozen=True)
class Series:
    """One curve; NaN values leave gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def thinned(series: Sequence[Series], most: int, *, stacked: bool) -> list[Series]:
    """Return the curves with their extremes alone, at most `most` points each."""
    values = [np.asarray(curve.y, float) for curve in series]
    if stacked:
        # Parts can be stacked only at the same steps.
        kept = [extremes(np.nansum(values, axis=0), most)] * len(values)
    else:
        kept = [extremes(each, most) for each in values]
    return [
        Series(curve.name, np.asarray(curve.x)[places].tolist(), each[places].tolist())
        for curve, each, places in zip(series, values, kept, strict=True)
    ]


def extremes(values: np.ndarray, most: int) -> np.ndarray:
    """Return the places of at most `most` values: the ends, and of equal parts the smallest and the largest one."""
    if len(values) <= most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), max(1, most // 2 - 1) + 1).astype(int)
    places = {0, len(values) - 1}
    for start, stop in pairwise(edges.tolist()):
        part = values[start:stop]
        finite = np.flatnonzero(~np.isnan(part))
        if len(finite):
            places |= {start + int(finite[part[finite].argmin()]), start + int(finite[part[finite].argmax()])}
        elif stop > start:
            places.add(start)
    return np.array(sorted(places))


def curve_figure(
    series: Sequence[Series],
    *,
    title: str,
    y_label: str,
    log_y: bool = False,
    stacked: bool = False,
    target: float | None = None,
) -> str:
    """Plot the curves over steps and return an `<svg>` element; the same input gives the same text.

    `title` is the accessible name; the page writes it above the figure. `stacked` stacks the curves as areas and reads
    NaN as 0. `target` is a dashed reference line. Several series get a legend, for which the figure grows.
    """
    # The salt keeps the ids of figures on the same HTML page distinct.
    with rc_context({**STYLE, "svg.hashsalt": f"{title}/{y_label}/{[s.name for s in series]}"}):
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
        axes = figure.add_subplot()
        if stacked:
            _plot_areas(axes, series)
        else:
            _plot_curves(axes, series, log_y=log_y)
        if target is not None:
            axes.axhline(target, color=_QUIET, linewidth=1.1, dashes=(4, 3), label=f"target {target:.3g}")
        if log_y and any(value > 0 for curve in series for value in curve.y):
            _set_log_scale(axes)
        # The axis has all steps, so that curves which end in NaN end before it does.
        axes.update_datalim([(step, 0.0) for curve in series for step in (curve.x[0], curve.x[-1])], updatey=False)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
        axes.margins(x=0.02)
        if not any(math.isfinite(value) for curve in series for value in curve.y):
            axes.set_yticks([])
        axes.set_xlabel("step")
        # A horizontal label above the axis is easier to read than a rotated one beside it.
        axes.set_title(y_label, loc="left", fontsize=10.5, color=_QUIET, pad=7)
        with warnings.catch_warnings():
            # The page's fonts, which draw the names, may have characters that those which measure them lack.
            warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
            if len(axes.get_legend_handles_labels()[0]) > 1:
                _add_legend(figure)
            return _svg(figure, title)


def _add_legend(figure: Figure) -> None:
    """Write the names of the curves below the axes, in as many columns as fit, of up to four."""
    for num_columns in (4, 3, 2, 1):
        legend = figure.legend(loc="outside lower left", ncols=num_columns)
        box = legend.get_window_extent()
        if box.width <= figure.bbox.width or num_columns == 1:
            figure.set_figheight(max(_HEIGHT_IN, _AXES_HEIGHT_IN + box.height / figure.dpi))
            return
        legend.remove()


def _label(name: str) -> str:
    """Return the name as the legend has it: in lines, and not hidden, as Matplotlib hides those that start with `_`."""
    label = "\n".join(textwrap.wrap(name, _LINE)) or " "
    return f" {label}" if label.startswith("_") else label


def _plot_curves(axes: Axes, series: Sequence[Series], *, log_y: bool) -> None:
    """Plot the curves. Where one would hide earlier ones, it is striped, and its points are rings around theirs.

    Points are marked if there are few, and if a line does not reach them because their neighbours have no value.
    """
    shown = [np.array(curve.y, float) for curve in series]
    under = _num_hidden([curve.x for curve in series], shown, log_y=log_y)
    for index, (curve, y) in enumerate(zip(series, shown, strict=True)):
        cycle, place = divmod(index, len(PALETTE))
        colour, dash = PALETTE[place], _DASHES[cycle % len(_DASHES)]
        # A segment is striped if both of its ends coincide with those of earlier curves.
        segments = np.minimum(under[index][:-1], under[index][1:]) if len(y) > 1 else under[index]
        for num in sorted({0, *segments.tolist()}):
            kept = np.zeros(len(y), bool)
            kept[: len(segments)] |= segments == num
            kept[len(y) - len(segments) :] |= segments == num
            axes.plot(
                curve.x,
                np.where(kept, y, np.nan),
                color=colour,
                linestyle=(0, (_STRIPE, _STRIPE * num)) if num else dash,
                label=None if num else _label(curve.name),
            )
        marked = _marked(y, log_y=log_y)
        for num in sorted(set(under[index][marked].tolist())):
            axes.plot(
                curve.x,
                np.where(marked & (under[index] == num), y, np.nan),
                color=colour,
                linestyle="none",
                marker="o",
                markersize=4 + 3 * min(num, 2),
                markerfacecolor="none" if num else colour,
            )


def _marked(y: np.ndarray, *, log_y: bool) -> np.ndarray:
    """Return which points get a marker: those without a neighbour, or all if there are few."""
    seen = np.isfinite(y) & ((y > 0) | (not log_y))
    if seen.sum() <= _FEW_POINTS:
        return seen
    around = np.pad(seen, 1)
    return seen & ~around[:-2] & ~around[2:]


def _num_hidden(xs: Sequence[Sequence[float]], ys: Sequence[np.ndarray], *, log_y: bool) -> list[np.ndarray]:
    """Return, for each point of each curve, how many earlier curves have nearly the same value there."""
    with np.errstate(divide="ignore", invalid="ignore"):
        heights = [np.where(y > 0, np.log10(y), np.nan) if log_y else y for y in ys]
    finite = np.concatenate([height[np.isfinite(height)] for height in heights])
    tolerance = _SAME * float(np.ptp(finite)) if len(finite) else 0.0
    found, earlier = list[np.ndarray](), list[dict[float, float]]()
    for x, height in zip(xs, heights, strict=True):
        others = np.array([[known.get(each, math.nan) for each in x] for known in earlier]).reshape(-1, len(x))
        found.append((np.abs(others - height) <= tolerance).sum(axis=0))
        earlier.append(dict(zip(x, height.tolist(), strict=True)))
    return found


def _plot_areas(axes: Axes, series: Sequence[Series]) -> None:
    steps = sorted({x for curve in series for x in curve.x})
    heights = []
    for curve in series:
        values = dict(zip(curve.x, curve.y, strict=True))
        heights.append(np.nan_to_num([values.get(step, 0.0) for step in steps]))
    colours = [PALETTE[index % len(PALETTE)] for index in range(len(series))]
    axes.stackplot(
        steps, heights, labels=[_label(curve.name) for curve in series], colors=colours, alpha=0.82, linewidth=0
    )
    axes.set_ylim(bottom=0)


def _set_log_scale(axes: Axes) -> None:
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    subs = (1.0,) if high / low > 50 else (1.0, 2.0, 5.0)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _svg(figure: Figure, title: str) -> str:
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=no_metadata)
    svg = buffer.getvalue()
    # Every figure has the same group ids, and nothing refers to them.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])
    return svg.replace("<svg", f'<svg role="img" aria-label={quoteattr(title)}', 1).strip()
