import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from megatron_bapo.config.schema import Config
from megatron_bapo.metrics import mlflow_sink
from megatron_bapo.metrics.mlflow_sink import ENVIRONMENT, MlflowSink, RowFollower, following_to_mlflow, metric_name
from megatron_bapo.metrics.sinks import JsonlSink, Phase, truncate_after
from megatron_bapo.run_directory import FINISHED, RunDirectory
from tests.ports import free_port
from tests.unit.config.examples import config

SECRET = "s3cret-w0rd"
ROWS: list[tuple[Phase, int, dict[str, float | None]]] = [
    ("warm_start", 1, {"actor/loss": 3.0}),
    ("validation", 0, {"val/mean@4": 0.25, "response_length/mean": 7.0}),
    ("train", 1, {"actor/loss": 0.5, "actor/bapo_clip_low": None}),
    ("train", 2, {"actor/loss": 0.25}),
]


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Restore the variables that a sink sets for MLflow's package."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        yield


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the URI of a database that this file's tests share, because MLflow takes seconds to create one."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def settings(run_dir: Path, uri: str | None, **values: Any) -> Config:
    mlflow = {"experiment": "reasoning", "tracking_uri": uri, **values}
    return config(run_dir=str(run_dir), logging__mlflow=mlflow)


def directory_of(folder: Path) -> RunDirectory:
    directory = RunDirectory(folder)
    directory.create()
    return directory


def write(directory: RunDirectory, rows: list[tuple[Phase, int, dict[str, float | None]]]) -> None:
    with JsonlSink(directory.metrics) as sink:
        for phase, step, metrics in rows:
            sink.write({"step": step, "phase": phase, "time_s": 10.0 + step, "metrics": metrics})


def send(directory: RunDirectory, config: Config) -> list[str]:
    """Have a sink send the file's rows; return its warnings."""
    warnings: list[str] = []
    MlflowSink(config, directory, warnings.append).close("FINISHED")
    return warnings


def run_of(client: MlflowClient, directory: RunDirectory) -> Any:
    experiment = client.get_experiment_by_name("reasoning")
    assert experiment is not None
    ours = directory.mlflow_id.read_text()
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`megatron_bapo.run` = '{ours}'")
    return run


def history(client: MlflowClient, run: Any, name: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, uri: str) -> RunDirectory:
    """Return the directory of a run that was resumed after its first step, when MLflow had its second one."""
    directory = directory_of(tmp_path_factory.mktemp("runs") / "first")
    given = settings(directory.root, uri, tags={"team": "maths"})
    write(directory, ROWS)
    assert send(directory, given) == []
    truncate_after(directory.metrics, 1)
    write(directory, [("train", 2, {"actor/loss": 0.75}), ("train", 3, {"actor/loss": 0.125})])
    changed = given.model_copy(update={"trainer": given.trainer.model_copy(update={"total_steps": 20})})
    assert send(directory, changed) == []
    return directory


def test_a_resumed_run_repeats_and_loses_no_step(resumed: RunDirectory, uri: str) -> None:
    client = MlflowClient(tracking_uri=uri)
    run = run_of(client, resumed)
    assert history(client, run, "actor/loss") == [(1, 0.5), (2, 0.25), (3, 0.125)]
    assert history(client, run, "training/global_step") == [(1, 1), (2, 2), (3, 3)]


def test_phases_have_names_of_their_own(resumed: RunDirectory, uri: str) -> None:
    client = MlflowClient(tracking_uri=uri)
    run = run_of(client, resumed)
    assert history(client, run, "warm_start/actor/loss") == [(1, 3.0)]
    assert history(client, run, "val/mean_at_4") == [(0, 0.25)]
    assert history(client, run, "validation/response_length/mean") == [(0, 7.0)]
    assert "actor/bapo_clip_low" not in run.data.metrics


def test_the_run_has_its_name_tags_and_configuration(resumed: RunDirectory, uri: str) -> None:
    run = run_of(MlflowClient(tracking_uri=uri), resumed)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.tags["team"] == "maths"
    assert run.data.params["algorithm.clip_bounds.ratio_lower_start"] == "0.6"
    assert run.data.params["logging.mlflow.experiment"] == "reasoning"
    assert json.loads(run.data.params["logging.profile_ranks"]) == [0]
    assert (run.data.params["trainer.total_steps"], run.data.tags["changed.trainer.total_steps"]) == ("10", "20")


@pytest.mark.parametrize(
    ("error", "phase", "status"),
    [
        (None, FINISHED, "FINISHED"),
        (None, "saving a checkpoint", "KILLED"),  # stopped
        (KeyboardInterrupt(), "training", "KILLED"),
        (RuntimeError(), "training", "FAILED"),
    ],
)
def test_mlflow_gets_how_the_run_has_ended(
    error: BaseException | None, phase: str, status: str, tmp_path: Path, uri: str
) -> None:
    directory, warnings = directory_of(tmp_path / "run"), list[str]()
    directory.phase.write_text(phase)
    given = settings(directory.root, uri, run_name="mine")
    with (
        nullcontext() if error is None else pytest.raises(type(error)),
        following_to_mlflow(given, directory, warnings.append),
    ):
        write(directory, ROWS)
        if error is not None:
            raise error
    client = MlflowClient(tracking_uri=uri)
    run = run_of(client, directory)
    assert (run.info.run_name, run.info.status, warnings) == ("mine", status, [])
    assert history(client, run, "actor/loss") == [(1, 0.5), (2, 0.25)]


def test_more_metrics_than_a_request_takes_are_sent_in_parts(tmp_path: Path, uri: str) -> None:
    directory = directory_of(tmp_path / "run")
    names = [f"val/task_{number}" for number in range(1500)]
    write(directory, [("train", step, dict.fromkeys(names, float(step))) for step in (1, 2)])
    assert send(directory, settings(directory.root, uri)) == []
    client = MlflowClient(tracking_uri=uri)
    run = run_of(client, directory)
    assert {name: run.data.metrics.get(name) for name in names} == dict.fromkeys(names, 2.0)
    assert history(client, run, names[-1]) == [(1, 1.0), (2, 2.0)]


@pytest.mark.slow
def test_without_a_uri_the_run_directory_has_the_database(tmp_path: Path) -> None:
    directory = directory_of(tmp_path / "run")
    write(directory, ROWS)
    assert send(directory, settings(directory.root, None)) == []
    client = MlflowClient(tracking_uri=f"sqlite:///{directory.root}/mlflow.db")
    assert history(client, run_of(client, directory), "actor/loss") == [(1, 0.5), (2, 0.25)]


@contextmanager
def tracking_server(database: Path, port: int) -> Iterator[None]:
    """Run MLflow's server."""
    command = [sys.executable, str(Path(__file__).with_name("mlflow_server.py")), str(database), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline()
            yield
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_server_that_is_down_costs_one_warning_and_no_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server goes down twice: the run begins with it, and starts again after the run has ended without it."""
    directory, warnings, database = directory_of(tmp_path / "run"), list[str](), tmp_path / "served.db"
    monkeypatch.setattr(mlflow_sink, "RETRY_S", 0.1)
    monkeypatch.setattr(mlflow_sink, "POLL_S", 0.1)
    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    port = free_port()
    with tracking_server(database, port):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{SECRET}@127.0.0.1:{port}")
        given = settings(directory.root, None)
        sink = MlflowSink(given, directory, warnings.append)
        write(directory, ROWS[:3])
        wait_until(lambda: directory.mlflow_id.exists() and sink._steps.get("training/global_step") == 1)
    write(directory, ROWS[3:])
    wait_until(lambda: bool(warnings))
    write(directory, [("train", 3, {"actor/loss": math.nan})])
    sink.close("FAILED")
    going_on, at_the_end = warnings
    assert going_on.startswith("logging.mlflow: MlflowException: API request to http://***@127.0.0.1:")
    assert "Training goes on" in going_on
    assert at_the_end.startswith("MLflow lacks the last metrics and that the run is FAILED: MlflowException")
    assert str(directory.metrics) in at_the_end
    assert SECRET not in "".join(warnings)
    assert history(client, run_of(client, directory), "actor/loss") == [(1, 0.5)]
    with tracking_server(database, port):
        assert send(directory, given) == []
    run = run_of(client, directory)
    assert history(client, run, "actor/loss") == [(1, 0.5), (2, 0.25)]
    assert history(client, run, "training/global_step") == [(1, 1), (2, 2), (3, 3)]
    assert run.info.status == "FINISHED"
    stored = run.data.to_dictionary()
    assert SECRET not in json.dumps(stored)
    assert SECRET.encode() not in database.read_bytes()


def test_rows_are_read_when_they_are_complete_and_anew_when_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with closing(RowFollower(path)) as rows:
        assert rows.read(9) == []
        path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
        assert rows.read(1) == [{"step": 1}]
        assert rows.read(9) == [{"step": 2}]
        with path.open("ab") as file:
            file.write(b'ep": 3}\n')
        assert rows.read(9) == [{"step": 3}]
        truncate_after(path, 1)
        assert rows.read(9) == [{"step": 1}]
        path.unlink()
        assert rows.read(9) == []


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("val/a b/mean@4", "val/a b/mean_at_4"),
        ("val/gsm8k+aime{x}", "val/gsm8k_aime_x_"),
        ("/val//../é", "val/_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_have_the_characters_that_mlflow_takes(name: str, taken: str) -> None:
    assert metric_name(name) == taken
