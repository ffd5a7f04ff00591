"""HTML report of a run: one self-contained file without scripts or network access."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_bapo.files import replace_text
from megatron_bapo.metrics.figures import SECTIONS, MetricTables, Section, curves, positive_share_target
from megatron_bapo.metrics.plots import MAX_POINTS, Series, curve_figure, thinned

_MAX_SAMPLES = 8
_HEADLINE = ("accuracy_before", "accuracy_after")


def write_report(
    run_dir: Path,
    *,
    title: str,
    summary: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    config_yaml: str,
) -> Path:
    """Write `run_dir/report.html` atomically and return its path.

    `summary` contains the headline's `accuracy_before` and `accuracy_after` (fractions, or None if not measured); its
    other entries are listed in order under their keys. `rows` are MetricsRows and `samples` are SampleRows as
    `sinks.read_rows` returns them. Figures without metrics are omitted.
    """
    target = positive_share_target(yaml.safe_load(config_yaml) or {})
    tables = MetricTables(rows)
    sections = [(section.title, _figures(section, tables, target)) for section in SECTIONS]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        title=title,
        before=summary.get("accuracy_before"),
        after=summary.get("accuracy_after"),
        facts={name.replace("_", " "): value for name, value in summary.items() if name not in _HEADLINE},
        sections=[(name, figures) for name, figures in sections if figures],
        sample_steps=_first_and_last_step(samples),
        config_yaml=config_yaml,
    )
    path = run_dir / "report.html"
    replace_text(path, page)
    return path


def _figures(section: Section, tables: MetricTables, target: float | None) -> list[dict[str, Any]]:
    figures = []
    for spec in section.figures:
        series = curves(spec, tables)
        if series:
            svg = curve_figure(
                thinned(series, MAX_POINTS, stacked=spec.stacked),
                title=spec.title,
                y_label=spec.y_label,
                log_y=spec.log_y,
                stacked=spec.stacked,
                target=target if spec.with_target else None,
            )
            change = _change(series[0]) if len(series) == 1 else ""
            seen = f"{spec.seen(tables.phase(spec.phase))} {_gaps(series)}".strip()
            texts = {"title": spec.title, "healthy": spec.healthy, "seen": seen}
            figures.append(texts | {"svg": Markup(svg), "change": change})
    return figures


def _change(curve: Series) -> str:
    first = next((value for value in curve.y if not math.isnan(value)), math.nan)
    return f"{_number(first)} → {_number(curve.y[-1])}"


def _gaps(series: Sequence[Series]) -> str:
    """Return a sentence about the steps in which no curve has a value; "" without such steps."""
    steps = np.array(series[0].x)
    gaps = steps[np.isnan([curve.y for curve in series]).all(axis=0)]
    return f"No finite value in {len(gaps)} of {len(steps)} steps, the first is {gaps[0]}." if len(gaps) else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def _first_and_last_step(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[Mapping[str, Any]]]]:
    steps = sorted({sample["step"] for sample in samples})
    ends = dict.fromkeys((*steps[:1], *steps[-1:]))
    return [(step, [sample for sample in samples if sample["step"] == step][:_MAX_SAMPLES]) for step in ends]
