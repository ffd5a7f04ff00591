from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import wandb
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.recorder import Recorder, write_line
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.metrics.sinks import JsonlSink, Phase, SampleRow, read_rows
from megatron_bapo.metrics.token_table import COLUMNS, read_token_tables, write_token_table
from megatron_bapo.metrics.values import Mean, Sum
from megatron_bapo.run_directory import RunDirectory
from tests.unit.data.test_rollout_table import response, written
from tests.unit.metrics.wandb_files import read_wandb

INTERRUPTED: list[tuple[Phase, int]] = [
    ("warm_start", 1),
    ("warm_start", 2),
    ("validation", 0),
    ("train", 1),
    ("train", 2),
    ("validation", 2),
    ("train", 3),
    ("validation", 3),
]
TOKENS = {name: np.ones(2, np.float32) for name in COLUMNS}


def sample(step: int) -> SampleRow:
    row = {"step": step, "prompt": "p", "response": "a", "ground_truth": "g", "reward": 1.0, "finish_reason": "stop"}
    return cast(SampleRow, row)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """The directory of a run that was killed in its fourth step."""
    directory = RunDirectory(tmp_path)
    directory.create()
    with JsonlSink(directory.metrics) as metrics, JsonlSink(directory.samples) as samples:
        for number, (phase, step) in enumerate(INTERRUPTED):
            metrics.write({"step": step, "phase": phase, "time_s": 1000.0 + number, "metrics": {}})
        for step in (1, 2, 3):
            samples.write(sample(step))
    with JsonlSink(directory.updates) as updates:
        for update, outcome in enumerate(("start", "start", "end", "start", "end", "end"), start=1):
            values = {f"actor/bapo_outcome/{name}": float(name == outcome) for name in ("start", "end")}
            updates.write({"step": (update + 1) // 2, "update": update, "metrics": values})
    for step in (1, 2, 3):
        write_token_table(directory.tokens, step, TOKENS)
    return directory


def record(directory: RunDirectory, state: RunState, *, tensorboard: bool = False, **logging: Any) -> Recorder:
    config = Config.model_validate(
        {
            "run_dir": directory.root,
            "model": {"create": {}},
            "data": {"train": {"path": "unused.jsonl"}},
            "trainer": {"total_steps": 4, "train_batch_size": 16, "ppo_mini_batch_size": 8},
            "logging": {"tensorboard": tensorboard, **logging},
        }
    )
    return Recorder(config, directory, state)


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (RunState(warm_start_step=2, step=2), INTERRUPTED[:6]),
        (RunState(warm_start_step=2), INTERRUPTED[:2]),
        (RunState(warm_start_step=1), INTERRUPTED[:1]),
        (RunState(), []),
    ],
    ids=["in training", "after the warm start", "in the warm start", "from the beginning"],
)
def test_a_resumed_run_keeps_and_remembers_the_rows_up_to_its_state(directory, state, kept):
    recorder = record(directory, state)
    recorder.close()

    assert recorder.recorded == set(kept)
    assert [(row["phase"], row["step"]) for row in read_rows(directory.metrics)] == kept
    assert [row["step"] for row in read_rows(directory.samples)] == [step for step in (1, 2) if step <= state.step]


def test_a_resumed_run_keeps_the_updates_and_tokens_up_to_its_step(directory):
    record(directory, RunState(warm_start_step=2, step=2)).close()

    assert [row["update"] for row in read_rows(directory.updates)] == [1, 2, 3, 4]
    assert list(read_token_tables(directory.tokens)) == [1, 2]


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        ({"records": {"requests.jsonl": 7, "quarantined.jsonl": 3}}, ["1\n2\n3\n4", "1\n2"]),
        ({"stream": {}}, ["1\n2\n3\n4\n5\n", "1\n2\n3\n"]),
        ({}, ["", ""]),
    ],
    ids=["checkpoint", "checkpoint without record sizes", "no checkpoint"],
)
def test_a_resumed_run_keeps_the_rollout_services_records_up_to_the_checkpoint(directory, data, kept):
    directory.requests.write_text("1\n2\n3\n4\n5\n")
    directory.quarantined.write_text("1\n2\n3\n")
    directory.engine_events.write_text("1\n")
    record(directory, RunState(step=2, data=data)).close()

    assert [path.read_text() for path in directory.service_records] == kept
    assert directory.engine_events.read_text() == "1\n"


def test_a_resumed_run_continues_the_update_count_and_the_fractions_of_outcomes(directory):
    recorder = record(directory, RunState(warm_start_step=2, step=2))
    for outcome in ("end", "start"):
        values = {f"actor/bapo_outcome/{name}": Mean(float(name == outcome), 1.0) for name in ("start", "end")}
        recorder.write_updates(3, [values | {"actor/grad_norm": Mean(2.0, 1.0)}])
    recorder.write_tokens(3, TOKENS)
    recorder.close()

    *_, first, second = read_rows(directory.updates)
    assert (first["step"], first["update"], second["update"]) == (3, 5, 6)
    assert first["metrics"]["actor/grad_norm"] == 2.0
    assert first["metrics"]["actor/bapo_outcome_so_far/start"] == pytest.approx(3 / 5)
    assert second["metrics"]["actor/bapo_outcome_so_far/end"] == pytest.approx(2 / 6)
    assert list(read_token_tables(directory.tokens)) == [1, 2, 3]


def test_no_sampled_tokens_leave_no_file(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()
    recorder = record(directory, RunState())
    recorder.write_tokens(1, {name: np.zeros(0, np.float32) for name in COLUMNS})
    recorder.close()

    assert not directory.tokens.exists()


def test_new_rows_follow_the_old_ones_and_their_time_continues(directory):
    directory.restarts.write_text('{"time_s": 9.0, "step": 3, "reason": "a rank was killed"}\n')
    recorder = record(directory, RunState(warm_start_step=2, step=2))
    recorder.write("train", 3, {"critic/score/mean": Mean(3.0, 4.0), "perf/total_num_tokens": Sum(12)})
    recorder.write_samples([sample(3)])
    recorder.close()

    *_, before, last = read_rows(directory.metrics)
    assert (last["phase"], last["step"]) == ("train", 3)
    assert last["metrics"] == {"critic/score/mean": 0.75, "perf/total_num_tokens": 12, "training/restarts": 1}
    assert before["time_s"] <= last["time_s"] < before["time_s"] + 60
    assert [row["step"] for row in read_rows(directory.samples)] == [1, 2, 3]


def test_a_new_run_starts_at_time_zero_with_nothing_recorded(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()

    recorder = record(directory, RunState(), tensorboard=True)
    recorder.write("train", 1, {"critic/score/mean": Mean(1.0, 1.0)})
    recorder.close()

    assert recorder.recorded == set()
    assert 0.0 <= read_rows(directory.metrics)[0]["time_s"] < 60.0
    assert len(list((directory.tensorboard / "train").iterdir())) == 1


def test_tensorboard_hides_training_steps_that_are_repeated_after_a_longer_warm_start(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()
    for state, value in ((RunState(), 1.0), (RunState(warm_start_step=200), 2.0)):
        recorder = record(directory, state, tensorboard=True)
        recorder.write("train", 1, {"critic/score/mean": Mean(value, 1.0)})
        recorder.close()
    first, second = (directory.tensorboard / "train").iterdir()

    events = [event for path in (first, second) for event in EventFileLoader(str(path)).Load()]

    assert [event.step for event in events if event.HasField("session_log")] == [1, 1]


def test_tensorboard_can_be_switched_off(directory):
    recorder = record(directory, RunState())
    recorder.write("train", 1, {"critic/score/mean": Mean(1.0, 1.0)})
    recorder.close()

    assert not directory.tensorboard.exists()


def test_the_phase_file_has_the_trainers_current_activity(directory):
    recorder = record(directory, RunState())
    assert directory.phase.read_text() == "loading"

    recorder.phase("generating")
    recorder.close()

    assert directory.phase.read_text() == "generating"


def test_a_replaced_line_leaves_no_partial_file(tmp_path):
    for line in ("a long first line", "short"):
        write_line(tmp_path / "phase", line)

    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("phase", "short")]


def test_a_mismatch_over_its_limit_is_counted_in_the_row_and_logged_as_a_warning(directory, caplog):
    recorder = record(directory, RunState(warm_start_step=2, step=2))
    mismatch = {"training/token_mult_prob_error": Mean(1.2, 1.0), "training/gen_kl_error": Mean(1e-5, 1.0)}
    recorder.write("train", 3, mismatch)
    recorder.write("train", 4, {"training/token_mult_prob_error": Mean(1.01, 1.0)})
    recorder.write("train", 5, {"actor/loss": Mean(1.0, 1.0)})
    recorder.close()

    *_, third, fourth, fifth = read_rows(directory.metrics)
    assert (third["metrics"]["training/mismatch_alarms"], fourth["metrics"]["training/mismatch_alarms"]) == (1, 0)
    assert "training/mismatch_alarms" not in fifth["metrics"]
    (warning,) = caplog.messages
    assert warning.startswith("step 3: training/token_mult_prob_error is 1.2, ")


@pytest.mark.slow
@pytest.mark.parametrize("sends_rollouts", [True, False])
def test_wandb_gets_sampled_rollouts_only_if_it_is_to_get_them(sends_rollouts: bool, directory: RunDirectory) -> None:
    wandb_section = {"project": "p", "mode": "offline", "rollouts": sends_rollouts}
    recorder = record(directory, RunState(step=1), wandb=wandb_section)
    recorder.add_sampled(written(directory.sampled_rollouts, [response("two")]))
    recorder.write("train", 2, {"actor/loss": Mean(1.0, 1.0)})
    recorder.close()
    wandb.teardown()
    found = read_wandb(directory.root)
    assert [values["actor/loss"] for _, values in found.rows] == [1.0]
    assert [rows[0]["response"] for _, _, rows in found.tables] == (["two"] if sends_rollouts else [])
