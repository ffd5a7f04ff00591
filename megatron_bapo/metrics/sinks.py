"""Sinks for metrics and sampled responses: JSON lines and TensorBoard.

A row's `step` counts the finished steps of its phase, starting at 1; validation at step 0 comes before training.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, Self

from pydantic import TypeAdapter, ValidationError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from megatron_bapo.errors import RunError
from megatron_bapo.files import replace_text
from megatron_bapo.records import FinishReason

Phase = Literal["warm_start", "train", "validation"]


class MetricsRow(TypedDict):
    step: int
    phase: Phase
    time_s: float
    """Seconds since the run started."""
    unix_s: NotRequired[float]
    """Unix time at which the row was written; absent in rows of earlier versions."""
    metrics: Mapping[str, float | None]


class UpdateRow(TypedDict):
    step: int
    update: int
    """Number of the update in the whole training phase, starting at 1."""
    metrics: Mapping[str, float | None]


class SampleRow(TypedDict):
    step: int
    prompt: str
    response: str
    ground_truth: str
    reward: float | None
    finish_reason: FinishReason


class StartRow(TypedDict):
    time_s: float
    """Unix time at which a trainer started."""
    version: str | None
    """Version of the installed package, None if it is not installed."""
    commit: str | None
    """Commit of the checkout, None without one."""
    hardware: str


class RestartRow(TypedDict):
    """One restart of a whole run from its newest checkpoint."""

    time_s: float
    """Unix time."""
    step: int
    """Furthest recorded step."""
    reason: str


class ResponseRow(TypedDict):
    """One sampled response of an evaluation."""

    problem: int
    """Index of the evaluated prompt, starting at 0."""
    sample: int
    """Index of the response to the problem, starting at 0."""
    data_source: str
    reward: float
    answer: str | None
    """Answer that the reward function extracted, if it returns one."""
    finish_reason: FinishReason
    num_tokens: int
    timed_out: bool
    """True if scoring timed out."""
    text: str


_ROWS = {
    name: TypeAdapter(row)
    for name, row in {
        "metrics.jsonl": MetricsRow,
        "updates.jsonl": UpdateRow,
        "samples.jsonl": SampleRow,
        "responses.jsonl": ResponseRow,
        "starts.jsonl": StartRow,
        "restarts.jsonl": RestartRow,
    }.items()
}
"""Form of the rows of each file. The rows of other files are any JSON objects."""
_ANY_ROW = TypeAdapter(dict[str, Any])


class JsonlSink:
    """Appends one JSON object per line and flushes it; NaN and infinities become null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # A killed run can leave an incomplete last line; without truncation the next row would be appended to it.
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: MetricsRow | UpdateRow | SampleRow | ResponseRow | StartRow | RestartRow) -> None:
        self._file.write(json.dumps(_without_non_finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorBoardSink:
    """Writes each phase as its own TensorBoard run (`folder/train`, ...), because the phases' steps overlap.

    `resume_steps` are the last steps to keep; later events of an interrupted run are hidden.
    """

    def __init__(self, folder: Path, *, resume_steps: Mapping[Phase, int] | None = None) -> None:
        self._folder = folder
        self._resume_steps = resume_steps or {}
        self._writers: dict[Phase, EventFileWriter] = {}

    def write(self, row: MetricsRow) -> None:
        writer = self._writers.get(row["phase"]) or self._open(row["phase"])
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in row["metrics"].items() if value is not None
        ]
        writer.add_event(Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values)))
        writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _open(self, phase: Phase) -> EventFileWriter:
        writer = EventFileWriter(str(self._folder / phase))
        self._writers[phase] = writer
        if phase in self._resume_steps:
            # At a session start TensorBoard drops the events of this step and later ones that it has read before.
            start = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=time.time(), step=self._resume_steps[phase] + 1, session_log=start))
        return writer


def tracker_values(row: MetricsRow) -> dict[str, float]:
    """Return a row's values under the names of trackers that have one space of names for all phases.

    Metrics of training and `val/*` keep their names; the others get their phase as prefix, unless they have it.
    """
    phase, metrics = row["phase"], row["metrics"]
    return {
        name if phase == "train" or name.startswith(("val/", f"{phase}/")) else f"{phase}/{name}": value
        for name, value in metrics.items()
        if value is not None
    }


def tracker_id(file: Path) -> str:
    """Return the id of the run at a tracker, which a file keeps; the first call creates a random one."""
    if not file.exists():
        replace_text(file, secrets.token_hex(4))
    return file.read_text()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return all complete rows of a file that a JsonlSink wrote; an incomplete last line is ignored.

    Raises RunError for a line that is not such a row.
    """
    return [row for _, row in _lines_and_rows(path)]


def read_new_rows(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete rows from byte `offset` on and the offset after them, to follow a growing file."""
    with path.open("rb") as file:
        file.seek(offset)
        complete, newline, _ = file.read().rpartition(b"\n")
    return [json.loads(line) for line in complete.splitlines()], offset + len(complete) + len(newline)


def truncate_after(path: Path, step: int, *, phase: Phase = "train") -> None:
    """Drop the rows after `step` of `phase`, because the resumed run writes them again; a missing file is not created.

    Training and validation follow the warm start; rows without a phase (updates, samples) belong to training.
    """
    if not path.exists():
        return
    last = (phase != "warm_start", step)
    kept = [
        line for line, row in _lines_and_rows(path) if (row.get("phase", "train") != "warm_start", row["step"]) <= last
    ]
    replace_text(path, "".join(line + "\n" for line in kept))


def _lines_and_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    form = _ROWS.get(path.name, _ANY_ROW)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # it is half written
            try:
                text = line[:-1].decode()
                row = json.loads(text)
                form.validate_python(row, strict=True)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                place = ".".join(map(str, first["loc"])) or "the row"
                problem = f"is damaged ({place}: {first['msg']})"
            except (ValueError, RecursionError) as error:
                problem = f"is not JSON ({error})"
            else:
                yield text, row
                continue
            raise RunError(f"{path}, line {number} {problem}; repair or delete that line")


def _without_non_finite(value: Any) -> Any:
    match value:
        case Mapping():
            return {key: _without_non_finite(item) for key, item in value.items()}
        case float():
            return value if math.isfinite(value) else None
        case _:
            return value
