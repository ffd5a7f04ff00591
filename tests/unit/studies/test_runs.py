import os
import signal
import subprocess
import sys
from io import StringIO

import pytest
from rich.console import Console

from megatron_bapo.studies import runs as study_runs
from megatron_bapo.studies.plan import StudyRun
from megatron_bapo.studies.runs import run_all
from tests.unit.studies.studies import make_study, write_run


@pytest.mark.slow
def test_a_failed_run_is_named_with_its_reason_and_runs_that_need_it_do_not_start(tmp_path):
    """The runs use the real `train` command, which refuses the unknown task before it starts anything."""
    start = {
        "data": {"train": {"reasoning_gym": {"no_such_task": {"size_": 1}}}},
        "parallel": {"tensor_model_parallel_size": 1},
    }
    _, runs = make_study(tmp_path, start=start, seeds=[1])
    console = Console(record=True, width=300, file=StringIO())

    failed = run_all(runs, 2, console)

    printed = console.export_text()
    assert [run.name for run in failed] == [run.name for run in runs]
    assert "start-seed1 failed with exit code 2" in printed
    assert "reasoning_gym has no task 'no_such_task'" in printed
    assert not runs[0].finished
    assert not runs[1].config.run_dir.exists()


def test_finished_runs_are_left_alone(tmp_path):
    _, runs = make_study(tmp_path)
    for run in runs:
        write_run(run)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    assert run_all(runs, 2, Console(quiet=True)) == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


IGNORES_SIGINT = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_study_that_a_script_starts_in_the_background_stops_its_runs(tmp_path, monkeypatch):
    """Such a study and its runs ignore SIGINT."""

    def launch(_: StudyRun) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", IGNORES_SIGINT], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(study_runs, "_launch", launch)
    _, runs = make_study(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_all(runs, 1, Console(quiet=True))
    assert not runs[0].finished
