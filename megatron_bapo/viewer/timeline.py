"""The timeline of a run: when engines and trainer worked and waited, with faults and restarts, as JSON values."""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_bapo.errors import RunError
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.viewer.answers import number
from megatron_bapo.viewer.follower import Follower
from megatron_bapo.viewer.rows import Request, engine_event, metrics_row, request, restart, start

NUM_BUCKETS = 500
"""Parts of the time in sight for which the load of engines and trainer is stated."""
MAX_BARS = 1500
"""Requests that are shown one by one; of more, only the load of their engines is shown."""
MAX_STEPS, MAX_EVENTS = 300, 500
_MAX_NAME, _MAX_ENGINES = 100, 64
_FIRST_S = 1e8
"""Requests that were sent earlier have times of a clock that is not Unix time, as earlier versions wrote them."""
_WARM_START = "warm_start"
_FIRST_PHASES = (_WARM_START, "generate", "transfer")
_LAST_PHASES = ("weight_sync",)


class Requests:
    """The requests of one engine as columns."""

    def __init__(self) -> None:
        self.sent_s, self.answered_s = array("d"), array("d")
        self.step, self.serial, self.num_tokens, self.num_responses = (array("q") for _ in range(4))

    def add(self, row: Request) -> None:
        for name, column in vars(self).items():
            column.append(getattr(row, name))


class Timeline:
    """Follows the records of a run that have times. Its methods may be called in several threads."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        directory = self._directory
        self._requests, self._metrics = Follower(directory.requests, request), Follower(directory.metrics, _step)
        self._engine_events = Follower(directory.engine_events, engine_event)
        self._restarts, self._starts = Follower(directory.restarts, restart), Follower(directory.starts, start)
        self._followers = (self._requests, self._metrics, self._engine_events, self._restarts, self._starts)
        self._rows: dict[Follower[dict[str, Any]], list[dict[str, Any]]] = {each: [] for each in self._followers[1:]}
        self._engines: dict[str, Requests] = {}
        self._num_undated = 0

    def answer(self, version: str, start: float | None, stop: float | None) -> dict[str, Any]:
        """Return what happened between two Unix times, by default in the whole run; times are seconds after `origin`.

        Only the version and the problems are returned if it is still `version`. If `is_all` is false, the files have
        more rows.
        """
        with self._lock:
            try:
                is_all = self._read()
            except RunError:
                self._open()  # so that the message comes again until the file is repaired
                raise
            now = "-".join(follower.version for follower in self._followers)
            problems = [problem for follower in self._followers for problem in follower.problems]
            found: dict[str, Any] = {"version": now, "is_all": is_all, "problems": problems}
            if version == now:
                return found
            steps, events = self._steps(), self._events()
            ends = self._ends(steps, events)
            if ends is None:
                return found | {"num_undated": self._num_undated}
            first, last = ends if start is None or stop is None or stop <= start else (start, stop)
            edges = np.linspace(first, max(last, first + 1e-3), NUM_BUCKETS + 1)
            return found | {
                "num_undated": self._num_undated,
                "origin": ends[0],
                "extent": ends[1] - ends[0],
                "start": first - ends[0],
                "stop": float(edges[-1]) - ends[0],
                "trainer": _trainer(steps, edges, ends[0], self._last_requests(edges)),
                "engines": self._engine_lanes(edges, ends[0], events),
                "events": [
                    event | {"time_s": event["time_s"] - ends[0]}
                    for event in events
                    if edges[0] <= event["time_s"] <= edges[-1]
                ][-MAX_EVENTS:],
            }

    def _read(self) -> bool:
        """Read what is new; return whether that is all there is."""
        new = self._requests.read()
        if new.from_start:
            self._engines, self._num_undated = {}, 0
        for row in new.rows:
            if row.sent_s < _FIRST_S:
                self._num_undated += 1
            else:
                self._engines.setdefault(row.engine, Requests()).add(row)
        return min(new.is_all, *map(self._read_rows, self._followers[1:]))

    def _read_rows(self, follower: Follower[dict[str, Any]]) -> bool:
        new = follower.read()
        if new.from_start:
            self._rows[follower].clear()
        self._rows[follower] += new.rows
        return new.is_all

    def _steps(self) -> list[dict[str, Any]]:
        """Return the training steps with the times at which they began and ended; the warm start is step 0."""
        steps = {}
        for row in self._rows[self._metrics]:
            if not (row.get("unix_s") and row["seconds"].get("step")):
                continue
            timed = row | {"start_s": row["unix_s"] - row["seconds"]["step"]}
            if row["phase"] == "train":
                steps[row["step"]] = timed
            elif row["phase"] == _WARM_START:
                start_s = steps.get(0, timed)["start_s"]
                seconds = {_WARM_START: row["unix_s"] - start_s}
                steps[0] = timed | {"step": 0, "start_s": start_s, "seconds": seconds}
        return [steps[step] for step in sorted(steps)]

    def _events(self) -> list[dict[str, Any]]:
        followers = self._engine_events, self._restarts, self._starts
        return sorted((row for each in followers for row in self._rows[each]), key=lambda event: event["time_s"])

    def _ends(
        self, steps: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
    ) -> tuple[float, float] | None:
        times = [event["time_s"] for event in events]
        for requests in self._engines.values():
            times += [float(np.min(requests.sent_s)), float(np.max(requests.answered_s))]
        if steps:
            times += [steps[0]["start_s"], steps[-1]["unix_s"]]
        return (min(times), max(times)) if times else None

    def _last_requests(self, edges: np.ndarray) -> dict[int, dict[str, Any]]:
        """Return, for each step, the request that was answered last before its batch was complete."""
        found: dict[int, dict[str, Any]] = {}
        for name, requests in self._engines.items():
            columns = _in_sight(requests, edges)
            order = np.lexsort((columns["answered_s"], columns["step"]))
            order = order[columns["serial"][order] >= 0]
            steps = columns["step"][order]
            for place in order[np.append(steps[1:] != steps[:-1], True)[: len(steps)]].tolist():
                step, answered_s = int(columns["step"][place]), float(columns["answered_s"][place])
                if step not in found or found[step]["answered_s"] < answered_s:
                    serial = int(columns["serial"][place])
                    found[step] = {"engine": name[:_MAX_NAME], "serial": serial, "answered_s": answered_s}
        return found

    def _engine_lanes(
        self, edges: np.ndarray, origin: float, events: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        columns = {name: _in_sight(requests, edges) for name, requests in self._engines.items()}
        is_few = sum(len(each["sent_s"]) for each in columns.values()) <= MAX_BARS
        failed = {event["engine"] for event in events if event["kind"] == "engine"}
        lanes = []
        for name in sorted(columns.keys() | failed, key=_natural)[:_MAX_ENGINES]:
            own = columns.get(name, {})
            sent, answered = own.get("sent_s", np.empty(0)), own.get("answered_s", np.empty(0))
            bars = None
            if is_few:
                times = [_seconds(sent - origin), _seconds(answered - origin)]
                bars = (
                    [times[0], times[1], *(own[key].tolist() for key in own if not key.endswith("_s"))] if own else []
                )
            lanes.append(
                {
                    "name": name[:_MAX_NAME],
                    "num": len(sent),
                    "busy": number(union_s(sent, answered, edges) / (edges[-1] - edges[0])),
                    "load": [number(each) for each in loads(sent, answered, edges).tolist()],
                    "bars": bars,
                    "down": [[a - origin, b - origin] for a, b in self._down(name, edges, events)],
                }
            )
        return lanes

    def _down(self, name: str, edges: np.ndarray, events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
        """Return the times in sight in which an engine was lost and neither served nor got a request."""
        sent = np.sort(np.array(self._engines[name].sent_s)) if name in self._engines else np.empty(0)
        own = [event for event in events if event.get("engine") == name]
        spans = list[tuple[float, float]]()
        for place, event in enumerate(own):
            lost_s = event["time_s"]
            if event["text"] == "serves" or (spans and lost_s < spans[-1][1]):
                continue
            served = [each["time_s"] for each in own[place:] if each["text"] == "serves"]
            later = int(np.searchsorted(sent, lost_s, side="right"))
            ends = [*served[:1], *sent[later : later + 1].tolist()]
            spans.append((lost_s, min(ends, default=float(edges[-1]))))
        shown = [(max(a, float(edges[0])), min(b, float(edges[-1]))) for a, b in spans]
        return [(a, b) for a, b in shown if b > a][-MAX_EVENTS:]


def _step(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the timeline needs of a row of metrics."""
    known, prefix = metrics_row(row), "timing_s/"
    seconds = {
        name.removeprefix(prefix): value
        for name, value in known["metrics"].items()
        if name.startswith(prefix) and value is not None and math.isfinite(value)
    }
    return {"step": known["step"], "phase": known["phase"], "unix_s": known.get("unix_s"), "seconds": seconds}


def _trainer(
    steps: Sequence[Mapping[str, Any]], edges: np.ndarray, origin: float, last: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the share of each phase of the steps in each bucket, and the steps themselves if they are few."""
    shown = [step for step in steps if step["unix_s"] >= edges[0] and step["start_s"] <= edges[-1]]
    spans: dict[str, list[tuple[float, float]]] = {}
    for step in shown:
        at_s = step["start_s"]
        for name in _in_order(step["seconds"]):
            spans.setdefault(name, []).append((at_s, at_s + step["seconds"][name]))
            at_s = spans[name][-1][1]
    phases = []
    for name in _in_order(spans):
        starts, stops = np.array(spans[name]).T
        share = loads(starts, stops, edges)
        total = union_s(starts, stops, edges) / (edges[-1] - edges[0])
        phases.append({"name": name[:_MAX_NAME], "share": number(total), "load": [number(x) for x in share.tolist()]})
    listed = [
        {
            "step": step["step"],
            "start": step["start_s"] - origin,
            "stop": step["unix_s"] - origin,
            "seconds": {name[:_MAX_NAME]: number(step["seconds"][name]) for name in _in_order(step["seconds"])},
            "last": last.get(step["step"]),
        }
        for step in (shown if len(shown) <= MAX_STEPS else ())
    ]
    return {"phases": phases, "steps": listed, "num_steps": len(shown)}


def _in_order(names: Mapping[str, Any]) -> list[str]:
    """Return the phases of a step in the order in which they happen."""
    middle = [name for name in names if name not in (*_FIRST_PHASES, *_LAST_PHASES, "step")]
    return [name for name in (*_FIRST_PHASES, *middle, *_LAST_PHASES) if name in names]


def _in_sight(requests: Requests, edges: np.ndarray) -> dict[str, np.ndarray]:
    columns = {name: np.array(column) for name, column in vars(requests).items()}
    seen = (columns["answered_s"] >= edges[0]) & (columns["sent_s"] <= edges[-1])
    order = np.flatnonzero(seen)
    order = order[np.argsort(columns["sent_s"][order], kind="stable")]
    return {name: column[order] for name, column in columns.items()}


def loads(starts: np.ndarray, stops: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the mean number of intervals that are open at a time, for each bucket between the edges."""
    open_s = _passed(starts, edges) - _passed(stops, edges)
    return np.maximum(0.0, np.diff(open_s) / np.diff(edges))


def _passed(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return, for each edge, the seconds since each earlier time, summed up."""
    ordered = np.sort(times) - edges[0]
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    places = np.searchsorted(ordered, edges - edges[0])
    return places * (edges - edges[0]) - sums[places]


def union_s(starts: np.ndarray, stops: np.ndarray, edges: np.ndarray) -> float:
    """Return the seconds between the first and the last edge in which at least one interval is open."""
    if not len(starts):
        return 0.0
    order = np.argsort(starts, kind="stable")
    starts, stops = np.clip(starts[order], edges[0], edges[-1]), np.clip(stops[order], edges[0], edges[-1])
    reached = np.concatenate([[edges[0]], np.maximum.accumulate(stops)[:-1]])
    return float(np.maximum(0.0, stops - np.maximum(starts, reached)).sum())


def _seconds(values: np.ndarray) -> list[float]:
    return np.round(values, 4).tolist()


def _natural(name: str) -> tuple[int, str]:
    """Sort "engine 2" before "engine 10"."""
    return len(name), name
