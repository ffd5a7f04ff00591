from pathlib import Path

import pytest

from megatron_bapo.controller.restarts import Restarts
from megatron_bapo.controller.run_state import RunDirectory
from megatron_bapo.errors import RunError
from megatron_bapo.metrics.sinks import JsonlSink, Phase, read_rows


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path)
    directory.create()
    return directory


def restarts(directory: RunDirectory, max_in_a_row: int = 2) -> Restarts:
    """Of a run whose parts have all been up."""
    made = Restarts(directory, max_in_a_row)
    made.may_help = True
    return made


def record(directory: RunDirectory, step: int, phase: Phase = "train") -> None:
    with JsonlSink(directory.metrics) as metrics:
        metrics.write({"step": step, "phase": phase, "time_s": 0.0, "metrics": {}})


def test_a_failure_that_comes_back_before_a_new_step_ends_the_run_with_both_reasons(directory: RunDirectory):
    record(directory, 7)
    allowed = restarts(directory)
    allowed.again("rank 3 was killed")
    directory.metrics.unlink()  # the steps after the checkpoint are done again
    record(directory, 5)
    allowed.again("rank 4 was killed")
    with pytest.raises(RunError, match=r"^rank 5 was killed\n.* 2 times since step 7 .*because: rank 3 was killed$"):
        allowed.again("rank 5 was killed")


def test_a_new_step_allows_all_restarts_anew(directory: RunDirectory):
    allowed = restarts(directory, max_in_a_row=1)
    for step, phase in ((3, "warm_start"), (1, "train"), (2, "train")):
        record(directory, step, phase)
        assert "restart 1 of 1" in allowed.again("a rank was killed")


def test_a_restart_is_told_logged_and_recorded(directory: RunDirectory):
    record(directory, 2)
    (directory.checkpoints / "step-00000004").mkdir()
    message = restarts(directory).again("a rank was killed")
    assert message == "after step 2: a rank was killed\nrestart 1 of 2 without a new step, from step-00000004"
    assert message in directory.trainer_log.read_text()
    (row,) = read_rows(directory.restarts)
    assert (row["step"], row["reason"]) == (2, "a rank was killed")


def test_what_never_came_up_is_not_started_again(directory: RunDirectory):
    with pytest.raises(RunError, match=r"^no memory for the cache$"):
        Restarts(directory, 3).again("no memory for the cache")
    with pytest.raises(RunError, match=r"^a rank was killed$"):
        restarts(directory, 0).again("a rank was killed")
