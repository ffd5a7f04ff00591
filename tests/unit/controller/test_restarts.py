from pathlib import Path

import pytest

from megatron_bapo.controller.restarts import Restarts
from megatron_bapo.errors import RunError
from megatron_bapo.metrics.sinks import JsonlSink, Phase, read_rows
from megatron_bapo.run_directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.create()
    return directory


def restarts(directory: RunDirectory, max_in_a_row: int = 2) -> Restarts:
    """Return the restarts of a run whose parts have all started."""
    created = Restarts(directory, max_in_a_row)
    created.run_has_started = True
    return created


def record(directory: RunDirectory, step: int, phase: Phase = "train") -> None:
    with JsonlSink(directory.metrics) as metrics:
        metrics.write({"step": step, "phase": phase, "time_s": 0.0, "metrics": {}})


def test_repeated_failures_without_a_new_step_end_the_run_with_the_first_and_last_reason(directory: RunDirectory):
    record(directory, 7)
    allowed = restarts(directory)
    allowed.use("rank 3 was killed")
    directory.metrics.unlink()  # the steps after the checkpoint are done again
    record(directory, 5)
    allowed.use("rank 4 was killed")
    with pytest.raises(RunError, match=r"^rank 5 was killed\n.* 2 times .* after step 7 .* was: rank 3 was killed$"):
        allowed.use("rank 5 was killed")


def test_a_new_step_resets_the_number_of_restarts(directory: RunDirectory):
    allowed = restarts(directory, max_in_a_row=1)
    for step, phase in ((3, "warm_start"), (1, "train"), (2, "train")):
        record(directory, step, phase)
        assert "restart 1 of 1" in allowed.use("a rank was killed")


def test_a_restart_is_returned_as_a_message_logged_and_recorded(directory: RunDirectory):
    record(directory, 2)
    directory.restarts.write_text('{"time_s"')  # the machine lost power while a restart was written
    (directory.checkpoints / "step-00000004").mkdir()
    message = restarts(directory).use("a rank was killed")
    assert message == "after step 2: a rank was killed\nrestart 1 of 2 without a new step, from step-00000004"
    assert message in directory.trainer_log.read_text()
    (row,) = read_rows(directory.restarts)
    assert (row["step"], row["reason"]) == (2, "a rank was killed")


def test_a_run_that_never_started_is_not_restarted(directory: RunDirectory):
    with pytest.raises(RunError, match=r"^no memory for the cache$"):
        Restarts(directory, 3).use("no memory for the cache")
    with pytest.raises(RunError, match=r"^a rank was killed$"):
        restarts(directory, 0).use("a rank was killed")
