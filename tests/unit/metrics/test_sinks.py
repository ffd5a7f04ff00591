import json
import math
import time
import tracemalloc
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_bapo.errors import RunError
from megatron_bapo.metrics.sinks import (
    JsonlSink,
    MetricsRow,
    Phase,
    SampleRow,
    TensorBoardSink,
    read_new_rows,
    read_rows,
    tracker_values,
    truncate_after,
)


def metrics_row(step: int, phase: Phase = "train", metrics: Mapping[str, float] | None = None) -> MetricsRow:
    return {"step": step, "phase": phase, "time_s": 1.5 * step, "metrics": metrics or {}}


def write(path: Path, *rows: MetricsRow) -> None:
    with JsonlSink(path) as sink:
        for row in rows:
            sink.write(row)


def steps(path: Path) -> list[tuple[str, int]]:
    return [(row["phase"], row["step"]) for row in read_rows(path)]


def tensorboard_scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_a_row_is_on_disk_as_soon_as_it_is_written(tmp_path: Path):
    path = tmp_path / "logs" / "metrics.jsonl"
    with JsonlSink(path) as sink:
        sink.write(metrics_row(1, metrics={"reward": 0.5}))
        assert read_rows(path) == [{"step": 1, "phase": "train", "time_s": 1.5, "metrics": {"reward": 0.5}}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_written_as_null(tmp_path: Path, value: float):
    write(tmp_path / "metrics.jsonl", metrics_row(1, metrics={"loss": value}))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["metrics"] == {"loss": None}


def test_a_sample_is_read_back_unchanged(tmp_path: Path):
    sample: SampleRow = {
        "step": 3,
        "prompt": "2 + 2 =\n",
        "response": "vier\u2028\ud800",
        "ground_truth": "4",
        "reward": 1.0,
        "finish_reason": "stop",
    }
    with JsonlSink(tmp_path / "samples.jsonl") as sink:
        sink.write(sample)
    assert read_rows(tmp_path / "samples.jsonl") == [sample]


def test_a_half_written_last_line_is_not_read_and_not_continued(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, metrics_row(1), metrics_row(2))
    path.write_bytes(path.read_bytes()[:-7])
    assert steps(path) == [("train", 1)]
    write(path, metrics_row(2))
    assert steps(path) == [("train", 1), ("train", 2)]


def test_rows_are_read_without_the_text_of_their_lines(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(('{"step": 1' + " " * 10_000 + "}\n") * 1000)
    tracemalloc.start()
    try:
        assert read_rows(path) == [{"step": 1}] * 1000
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(path, metrics_row(1))
    path.write_bytes(path.read_bytes() + b"\x00\xff\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("metrics.jsonl", {"step": 1}, "phase: Field required"),
        ("metrics.jsonl", metrics_row(1) | {"step": "1"}, "step: Input should be a valid integer"),
        ("metrics.jsonl", metrics_row(1) | {"metrics": {"reward": "high"}}, "metrics.reward: Input should be a valid"),
        ("updates.jsonl", {"step": 1, "metrics": {}}, "update: Field required"),
        ("samples.jsonl", [1], "the row: Input should be a valid dictionary"),
        ("starts.jsonl", {"time_s": 1.5}, "version: Field required"),
        ("restarts.jsonl", 3, "the row: Input should be a valid dictionary"),
    ],
)
def test_a_row_of_another_form_is_named_with_its_field(tmp_path: Path, name: str, row: object, problem: str):
    path = tmp_path / name
    path.write_text(f"{json.dumps(row)}\n")
    with pytest.raises(RunError, match=rf"{name}, line 1 is damaged \({problem}.*\); repair or delete that line"):
        read_rows(path)


def test_resuming_in_training_keeps_the_warm_start_and_drops_later_steps(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        metrics_row(9, "warm_start"),
        metrics_row(0, "validation"),
        metrics_row(1),
        metrics_row(2),
        metrics_row(2, "validation"),
        metrics_row(3),
    )
    truncate_after(path, 2)
    assert steps(path) == [("warm_start", 9), ("validation", 0), ("train", 1), ("train", 2), ("validation", 2)]
    assert list(tmp_path.iterdir()) == [path]


def test_resuming_in_the_warm_start_drops_everything_after_it(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write(
        path, metrics_row(1, "warm_start"), metrics_row(2, "warm_start"), metrics_row(1), metrics_row(1, "validation")
    )
    truncate_after(path, 1, phase="warm_start")
    assert steps(path) == [("warm_start", 1)]


def test_truncating_a_missing_file_creates_none(tmp_path: Path):
    truncate_after(tmp_path / "metrics.jsonl", 2)
    assert not list(tmp_path.iterdir())


def test_tensorboard_reads_back_what_was_written(tmp_path: Path):
    with closing(TensorBoardSink(tmp_path)) as sink:
        sink.write(metrics_row(1, "warm_start", {"actor/loss": 3.0}))
        sink.write(metrics_row(1, metrics={"actor/loss": 0.5, "actor/entropy": 1.25}))
        sink.write(metrics_row(2, metrics={"actor/loss": 0.25}))
    assert tensorboard_scalars(tmp_path / "warm_start", "actor/loss") == [(1, 3.0)]
    assert tensorboard_scalars(tmp_path / "train", "actor/loss") == [(1, 0.5), (2, 0.25)]
    assert tensorboard_scalars(tmp_path / "train", "actor/entropy") == [(1, 1.25)]


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path):
    with closing(TensorBoardSink(tmp_path)) as sink:
        for step in (1, 2, 3, 4):
            sink.write(metrics_row(step, metrics={"reward": float(step)}))
    # TensorBoard reads files in the order of the seconds in their names, and then of a number as text: 10 before 9.
    time.sleep(1.0)
    with closing(TensorBoardSink(tmp_path, resume_steps={"train": 2})) as sink:
        sink.write(metrics_row(3, metrics={"reward": 30.0}))
    assert tensorboard_scalars(tmp_path / "train", "reward") == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_growing_file_is_followed_without_half_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    rows, offset = read_new_rows(path, 0)
    assert [row["step"] for row in rows] == [1, 2]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    rows, offset = read_new_rows(path, offset)
    assert [row["step"] for row in rows] == [3]
    assert read_new_rows(path, offset) == ([], offset)


@pytest.mark.parametrize(
    ("phase", "name", "shown"),
    [
        ("train", "actor/loss", "actor/loss"),
        ("warm_start", "actor/loss", "warm_start/actor/loss"),
        ("validation", "response_length/mean", "validation/response_length/mean"),
        ("validation", "val/mean@4", "val/mean@4"),
        ("validation", "validation/quarantined", "validation/quarantined"),
    ],
)
def test_trackers_get_the_phase_in_each_name_once(phase: Phase, name: str, shown: str):
    assert tracker_values(metrics_row(1, phase, {name: 1.0})) == {shown: 1.0}
