"""The figures of a run, which the report and the viewer show: their metrics, captions and curves."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from megatron_bapo.metrics.plots import PALETTE, Series
from megatron_bapo.metrics.sinks import Phase


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
    except_for: str = ""
    """Pattern of metrics that another figure has."""
    omit_zeros: bool = False
    """Whether curves that are 0 throughout are left out."""
    seen: Callable[[MetricTable], str] = lambda _: ""
    """Returns a sentence about what the figure shows in this run."""


@dataclass(frozen=True)
class Section:
    title: str
    figures: tuple[FigureSpec, ...]


def _bound_moves(table: MetricTable) -> str:
    moved = table.column("actor/bapo_outcome/interior") + table.column("actor/bapo_outcome/end")
    shares = table.column("actor/bapo_initial_positive_share")
    if np.isnan(moved).all() or np.isnan(shares).all():
        return ""
    if np.nanmax(moved) > 0:
        return f"Here they moved in {np.nanmean(moved):.0%} of the updates."
    return f"Here they did not move: the positive share, {np.nanmean(shares):.2f} on average, was above the target."


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
                except_for="val/score/*",
            ),
            FigureSpec(
                "Held-out score",
                "Healthy: rises with the accuracy; if only the score rises, the policy collects partial rewards.",
                {"val/score/*": ""},
                "reward per response",
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
                {
                    "response_length/mean": "mean",
                    "response_length/positive": "mean, A > 0",
                    "response_length/negative": "mean, A < 0",
                    "response_length/max": "longest",
                },
                "tokens",
            ),
            FigureSpec(
                "Truncated responses",
                "Healthy: near zero; a tenth or more needs a longer limit or a penalty on overlong responses.",
                {"response_length/clip_ratio": "truncated"},
                "fraction of responses",
            ),
            FigureSpec(
                "Uniform groups",
                "Healthy: the smaller part; nothing is learned from groups whose rewards are all equal.",
                {"training/uniform_groups": "uniform"},
                "fraction of groups",
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
                seen=_bound_moves,
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
                "Learning rate",
                "Healthy: follows the schedule that was configured, which counts updates.",
                {"actor/lr": "learning rate"},
                "learning rate",
            ),
            FigureSpec(
                "Staleness of the tokens",
                "Healthy: the mean stays well below the limit rollout.max_staleness; 0 in a synchronous run.",
                {"rollout/staleness/mean": "mean", "rollout/staleness/max": "oldest token"},
                "policy versions",
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
        "Prompts",
        (
            FigureSpec(
                "Prompts on their way",
                "Healthy: constant; prompts that are buffered in growing numbers become stale.",
                {
                    "rollout/accounting/in_flight": "in flight",
                    "rollout/accounting/buffered": "buffered",
                    "rollout/accounting/returned": "to be generated again",
                },
                "prompts",
                omit_zeros=True,
            ),
            FigureSpec(
                "Prompts that are done",
                "Healthy: trained on or used in the warm start; each dropped or quarantined prompt is wasted work.",
                {
                    "rollout/accounting/trained": "trained on",
                    "rollout/accounting/warm_start": "warm start",
                    "rollout/accounting/dropped_uniform": "dropped, uniform",
                    "rollout/accounting/dropped_stale": "dropped, stale",
                    "rollout/accounting/quarantined": "quarantined",
                    "rollout/accounting/skipped": "skipped by the curriculum",
                },
                "prompts since the start",
                omit_zeros=True,
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


class MetricTable:
    """The metrics of one phase as columns, to which rows are added one by one."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Add a row. A later row of the same step, written after a resume, replaces the earlier one."""
        if step in self._places:
            for column in self._columns.values():
                if self._places[step] < len(column):
                    column[self._places[step]] = math.nan
        place = self._places.setdefault(step, len(self._places))
        for name, value in metrics.items():
            column = self._columns.setdefault(name, array("d"))
            column.extend([math.nan] * (place + 1 - len(column)))
            column[place] = math.nan if value is None else float(value)

    @property
    def names(self) -> Iterable[str]:
        return self._columns.keys()

    @property
    def steps(self) -> np.ndarray:
        """The steps in ascending order."""
        return np.sort(np.fromiter(self._places, np.int64, len(self._places)))

    def column(self, name: str) -> np.ndarray:
        """Return the values in the order of `steps`, NaN where a row has none."""
        values = np.full(len(self._places), math.nan)
        known = self._columns.get(name, array("d"))
        values[: len(known)] = known
        return values[np.argsort(np.fromiter(self._places, np.int64, len(self._places)), kind="stable")]


class MetricTables:
    """The metrics of a run, a table for each phase."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._tables: dict[str, MetricTable] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        self._tables.setdefault(row["phase"], MetricTable()).add(row["step"], row["metrics"])

    def phase(self, name: Phase) -> MetricTable:
        return self._tables.get(name, MetricTable())


def curves(spec: FigureSpec, tables: MetricTables) -> list[Series]:
    """Return the figure's curves in the order of its patterns, null as NaN.

    Curves without any number are omitted, unless the figure has no others.
    """
    table = tables.phase(spec.phase)
    steps = table.steps.tolist()
    series, empty = list[Series](), list[Series]()
    for pattern, label in spec.metrics.items():
        for name in table.names:
            if not fnmatchcase(name, pattern) or fnmatchcase(name, spec.except_for):
                continue
            values = table.column(name)
            if spec.omit_zeros and not np.nan_to_num(values).any():
                continue
            found = empty if np.isnan(values).all() else series
            found.append(Series(label or name.removeprefix(pattern.rstrip("*")), steps, values.tolist()))
    return _parts_of_whole(series) if spec.stacked else series or empty


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


def positive_share_target(config: Mapping[str, Any]) -> float | None:
    """Return BAPO's target as a share P/(P+N), whichever measure the run compares; None without a BAPO section."""
    return config.get("algorithm", {}).get("clip_bounds", {}).get("positive_contribution_target")
