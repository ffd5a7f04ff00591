"""The figures, the state and the prompts of a run that may still be running, as JSON values."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megatron_bapo.errors import RunError
from megatron_bapo.metrics.figures import (
    SECTIONS,
    FigureSpec,
    MetricTables,
    Section,
    curves,
    positive_share_target,
)
from megatron_bapo.metrics.plots import MAX_POINTS, Series, thinned
from megatron_bapo.metrics.sinks import MetricsRow, read_rows
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.viewer.answers import fitting, number
from megatron_bapo.viewer.follower import Follower
from megatron_bapo.viewer.rows import MAX_NAME, metrics_row, quarantined_prompt

_MAX_CURVES, _MAX_TEXT, _MAX_QUARANTINED = 100, 1000, 100
_ACCOUNTING = "rollout/accounting/"


@dataclass(frozen=True)
class Zoom:
    """The steps that are shown, both ends included; None: to the end."""

    start: float | None = None
    stop: float | None = None

    def rows(self, steps: np.ndarray) -> slice:
        """Return the rows to draw: those in sight, and one more on each side so that lines reach the edges."""
        first = 0 if self.start is None else max(0, int(np.searchsorted(steps, self.start)) - 1)
        return slice(first, None if self.stop is None else int(np.searchsorted(steps, self.stop, side="right")) + 1)


class LiveRun:
    """Follows the metrics of a run. Its methods may be called in several threads."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._metrics = Follower(self._directory.metrics, metrics_row)
        self._quarantined = Follower(self._directory.quarantined, quarantined_prompt)
        self._prompts, self._num_quarantined = deque[dict[str, Any]](maxlen=_MAX_QUARANTINED), 0
        self._clear_metrics()

    def _clear_metrics(self) -> None:
        self._tables, self._last, self._accounting = MetricTables(), dict[str, Any](), dict[str, float]()

    def figures(self, version: str, train: Zoom, warm_start: Zoom) -> dict[str, Any]:
        """Return the state of the run with the problems of its files, and its figures unless they have this version.

        `version` is that of the answer before. If `is_all` is false, the files have more rows.
        """
        with self._lock:
            try:
                is_all = self._read()
            except RunError:
                self._open()  # so that the message comes again until the file is repaired
                raise
            config, problems = _config_and_problems(self._directory)
            problems += [*self._metrics.problems, *self._quarantined.problems]
            now = f"{self._metrics.version}-{self._quarantined.version}"
            answer = {"version": now, "is_all": is_all, "problems": problems, "state": self._state(config)}
            if version == now:
                return answer
            answer["prompts"] = self._prompt_counts()
            target = positive_share_target(config)
            shown = {"train": train, "validation": train, "warm_start": warm_start}

            def sections(points: int) -> dict[str, Any]:
                found = [(section, self._figures(section, shown, points, target)) for section in SECTIONS]
                return answer | {"sections": [{"title": each.title, "figures": figures} for each, figures in found]}

            return fitting(MAX_POINTS, sections)

    def _read(self) -> bool:
        """Read what is new; return whether that is all there is."""
        new = self._metrics.read()
        if new.from_start:
            self._clear_metrics()
        for row in new.rows:
            self._add(row)
        skipped = self._quarantined.read()
        if skipped.from_start:
            self._prompts.clear()
            self._num_quarantined = 0
        self._prompts.extend(skipped.rows)
        self._num_quarantined += len(skipped.rows)
        return new.is_all and skipped.is_all

    def _add(self, row: MetricsRow) -> None:
        self._tables.add(row)
        self._last = {"step": row["step"], "phase": row["phase"], "time_s": row["time_s"]}
        metrics = row["metrics"].items()
        counts = {name: value for name, value in metrics if name.startswith(_ACCOUNTING) and value is not None}
        self._accounting = counts or self._accounting

    def _state(self, config: Mapping[str, Any]) -> dict[str, Any]:
        directory = self._directory
        phase = directory.phase.read_text(errors="replace")[:_MAX_TEXT] if directory.phase.is_file() else ""
        return {
            "phase": phase,
            "is_finished": directory.is_finished,
            "row": self._last,
            "total_steps": config.get("trainer", {}).get("total_steps"),
            "written_s": directory.metrics.stat().st_mtime if directory.metrics.is_file() else None,
        }

    def _prompt_counts(self) -> dict[str, Any]:
        counts = [
            (label, number(self._accounting[name]))
            for section in SECTIONS
            for spec in section.figures
            for name, label in spec.metrics.items()
            if name in self._accounting
        ]
        return {"counts": counts, "num_quarantined": self._num_quarantined, "quarantined": [*self._prompts]}

    def _figures(
        self, section: Section, shown: Mapping[str, Zoom], points: int, target: float | None
    ) -> list[dict[str, Any]]:
        figures = []
        for spec in section.figures:
            found = curves(spec, self._tables)[:_MAX_CURVES]
            if found:
                figures.append(_figure(spec, found, shown[spec.phase], points, target if spec.with_target else None))
        return figures


def _config_and_problems(directory: RunDirectory) -> tuple[dict[str, Any], list[str]]:
    try:
        return read_config(directory), []
    except RunError as error:
        return {}, [str(error)[:_MAX_TEXT]]


def read_config(directory: RunDirectory) -> dict[str, Any]:
    """Return the resolved configuration of a run, which is empty before it is written."""
    path = directory.config
    return _parsed(path, path.stat().st_mtime_ns) if path.is_file() else {}


@lru_cache(maxsize=16)
def _parsed(path: Path, modified_ns: int) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RunError(f"{path} is not YAML: {error}") from None
    return config if isinstance(config, dict) else {}


def last_start(directory: RunDirectory) -> dict[str, Any]:
    """Return what the run was started with last, under a key that no configuration has."""
    rows = read_rows(directory.starts) if directory.starts.is_file() else []
    return {"(started with)": {key: rows[-1].get(key) for key in ("commit", "hardware", "version")}} if rows else {}


def _figure(spec: FigureSpec, found: Sequence[Series], zoom: Zoom, points: int, target: float | None) -> dict[str, Any]:
    rows = zoom.rows(np.asarray(found[0].x))
    in_sight = [Series(curve.name, curve.x[rows], curve.y[rows]) for curve in found]
    shown = [
        {"name": curve.name[:MAX_NAME], "x": curve.x, "y": [number(y) for y in curve.y]}
        for curve in thinned(in_sight, points, stacked=spec.stacked)
    ]
    return {
        "title": spec.title,
        "healthy": spec.healthy,
        "y_label": spec.y_label,
        "x_label": "warm-start step" if spec.phase == "warm_start" else "step",
        "log_y": spec.log_y,
        "stacked": spec.stacked,
        "target": target,
        "curves": shown,
    }


def config_differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the keys whose values are not the same in all of the configurations, with their values as text.

    `run_dir` is left out. A key that a configuration does not have has the value "–".
    """
    flat = [_flat(config) for config in configs]
    keys = sorted({key for each in flat for key in each} - {"run_dir"})
    rows = [(key, [each.get(key, "–") for each in flat]) for key in keys]
    return [(key[:MAX_NAME], [value[:MAX_NAME] for value in values]) for key, values in rows if len(set(values)) > 1]


def _flat(config: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(config, dict) or (prefix and not config):
        return {prefix: config if isinstance(config, str) else json.dumps(config, default=str)}
    return {
        name: value
        for key, child in config.items()
        for name, value in _flat(child, f"{prefix}.{key}" if prefix else str(key)).items()
    }
