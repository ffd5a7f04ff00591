"""HTML report of a run: one self-contained file without scripts or network access."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatron_bapo.metrics.plots import PALETTE, Series, curve_figure
from megatron_bapo.metrics.sinks import Phase, replace_text

_MAX_SAMPLES = 8
_HEADLINE = ("accuracy_before", "accuracy_after")


@dataclass(frozen=True)
class FigureSpec:
    """A figure of the report.

    `metrics` maps a metric name, or a pattern with one `*`, to its label in the legend. The label of a pattern is the
    text that matches its `*`.
    """

    title: str
    healthy: str
    metrics: Mapping[str, str]
    y_label: str
    phase: Phase = "train"
    log_y: bool = False
    stacked: bool = False
    with_target: bool = False


@dataclass(frozen=True)
class Section:
    title: str
    figures: tuple[FigureSpec, ...]


SECTIONS = (
    Section(
        "Learning",
        (
            FigureSpec(
                "Held-out accuracy",
                "Healthy: rises with the reward; if only the reward rises, it is memorized or gamed.",
                {"val/*": ""},
                "accuracy",
                phase="validation",
            ),
            FigureSpec(
                "Mean reward of the sampled responses",
                "Healthy: rises, with noise between batches, and levels off near the maximum that the task allows.",
                {"critic/score/mean": "reward"},
                "reward per response",
            ),
            FigureSpec(
                "Multi-turn responses",
                "Healthy: rises if the environment's replies help, and the accuracy rises with it.",
                {"num_turns/multi_turn_ratio": "multi-turn"},
                "fraction of responses",
            ),
            FigureSpec(
                "Warm-start loss",
                "Healthy: falls steeply, then slowly, without spikes.",
                {"actor/loss": "loss"},
                "nats per token",
                phase="warm_start",
            ),
            FigureSpec(
                "Response length",
                "Healthy: becomes stable; growth without reward means rambling, a fall towards zero means giving up.",
                {"response_length/mean": "mean", "response_length/max": "longest"},
                "tokens",
            ),
        ),
    ),
    Section(
        "Clipping",
        (
            FigureSpec(
                "Positive share of the policy loss",
                "Healthy: the adapted bounds raise the share to the target, or as far as their ranges allow.",
                {
                    "actor/bapo_initial_positive_share": "at the initial bounds",
                    "actor/bapo_positive_share": "at the bounds used",
                },
                "positive / (positive + negative)",
                with_target=True,
            ),
            FigureSpec(
                "Clip bounds",
                "Healthy: vary with the batches within their ranges; a bound that stays at a limit needs a new range.",
                {"actor/bapo_clip_high": "upper", "actor/bapo_clip_low": "lower"},
                "probability ratio",
            ),
            FigureSpec(
                "Clipped tokens",
                "Healthy: a few percent; more means that updates are too large or trajectories too stale.",
                {
                    "actor/pg_clipfrac": "all",
                    "actor/pg_clipfrac_lower": "at the lower bound",
                    "actor/pg_clipfrac_upper": "at the upper bound",
                },
                "fraction of tokens",
            ),
        ),
    ),
    Section(
        "Stability",
        (
            FigureSpec(
                "Entropy of the policy",
                "Healthy: falls slowly and stays above zero; a collapse ends exploration.",
                {"actor/entropy": "entropy"},
                "nats per token",
            ),
            FigureSpec(
                "Gradient norm before clipping",
                "Healthy: stays within one order of magnitude; repeated spikes call for a lower learning rate.",
                {"actor/grad_norm": "norm"},
                "L2 norm",
            ),
            FigureSpec(
                "Policy divergence within a step",
                "Healthy: small and without a trend; growth means that late updates train on stale data.",
                {"actor/ppo_kl": "KL"},
                "nats per token",
            ),
            FigureSpec(
                "Train/rollout probability mismatch",
                "Healthy: flat, at the level of rounding errors; growth means that weights or arithmetic diverge.",
                {"training/rollout_probs_diff_mean": "mean", "training/rollout_probs_diff_max": "largest"},
                "difference per token, log scale",
                log_y=True,
            ),
        ),
    ),
    Section(
        "Cost",
        (
            FigureSpec(
                "Time per step",
                "Healthy: constant; if a single phase grows, investigate that phase.",
                {"timing_s/*": ""},
                "seconds",
                stacked=True,
            ),
            FigureSpec(
                "Throughput",
                "Healthy: constant; it falls when batches shrink or waiting times grow.",
                {"perf/throughput": "throughput"},
                "tokens/s",
            ),
        ),
    ),
)


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
    target = _positive_share_target(config_yaml)
    sections = [(section.title, _figures(section, rows, target)) for section in SECTIONS]
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


def _figures(section: Section, rows: Sequence[Mapping[str, Any]], target: float | None) -> list[dict[str, Any]]:
    figures = []
    for spec in section.figures:
        series = _series(spec, rows)
        if series:
            svg = curve_figure(
                series,
                x_label="step",
                y_label=spec.y_label,
                log_y=spec.log_y,
                stacked=spec.stacked,
                target=target if spec.with_target else None,
            )
            change = _change(series[0]) if len(series) == 1 else ""
            figures.append({"title": spec.title, "healthy": spec.healthy, "svg": Markup(svg), "change": change})
    return figures


def _series(spec: FigureSpec, rows: Iterable[Mapping[str, Any]]) -> list[Series]:
    """Return the figure's curves in the order of its patterns, null as NaN; curves without any number are omitted."""
    # A later row of the same step, written after a resume, replaces the earlier one.
    metrics_by_step = {row["step"]: row["metrics"] for row in rows if row["phase"] == spec.phase}
    steps = sorted(metrics_by_step)
    names = dict.fromkeys(name for step in steps for name in metrics_by_step[step])
    series = []
    for pattern, label in spec.metrics.items():
        for name in filter(lambda name: fnmatchcase(name, pattern), names):
            values = [metrics_by_step[step].get(name) for step in steps]
            points = [math.nan if value is None else float(value) for value in values]
            if not all(map(math.isnan, points)):
                series.append(Series(label or name.removeprefix(pattern.rstrip("*")), steps, points))
    return _parts_of_whole(series) if spec.stacked else series


def _parts_of_whole(series: list[Series]) -> list[Series]:
    """Return the series to stack: no total, the largest first; those beyond the palette's size are summed up."""
    parts = [part for part in series if part.name != "step"]
    parts.sort(key=lambda part: float(-sum(value for value in part.y if not math.isnan(value))))
    kept, rest = parts[: len(PALETTE) - 1], parts[len(PALETTE) - 1 :]
    if len(rest) < 2:
        return parts
    others = [
        sum(0.0 if math.isnan(value) else value for value in values)
        for values in zip(*(part.y for part in rest), strict=True)
    ]
    return [*kept, Series("other", rest[0].x, others)]


def _change(curve: Series) -> str:
    values = [value for value in curve.y if not math.isnan(value)]
    return f"{_number(values[0])} → {_number(values[-1])}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def _positive_share_target(config_yaml: str) -> float | None:
    """Return BAPO's target as a share P/(P+N), whichever measure the run compares; None without a BAPO section."""
    config = yaml.safe_load(config_yaml) or {}
    return config.get("algorithm", {}).get("clip_bounds", {}).get("positive_contribution_target")


def _first_and_last_step(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[Mapping[str, Any]]]]:
    steps = sorted({sample["step"] for sample in samples})
    ends = dict.fromkeys((*steps[:1], *steps[-1:]))
    return [(step, [sample for sample in samples if sample["step"] == step][:_MAX_SAMPLES]) for step in ends]
