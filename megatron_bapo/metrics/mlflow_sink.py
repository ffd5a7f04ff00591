"""Sink for MLflow, for which the launcher has a thread. It imports the optional package mlflow (or mlflow-skinny).

trainer ──► metrics.jsonl ──► thread of the launcher ──► tracking server or database

Training never waits for MLflow: the thread follows the file, and what a server that is down has missed is sent later,
even by the next start of the run. The launcher knows how a run ended, also if a trainer rank was killed.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, BinaryIO, Final, Literal

from megatron_bapo.config.foreign_keys import flattened
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.sinks import MetricsRow, Phase, tracker_id, tracker_values
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.text import visible, without_credentials

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""MLflow's states of a run that has ended. A run that was stopped, and can be continued, is KILLED."""
STEP_METRICS: Final[dict[Phase, str]] = {
    "warm_start": "warm_start/global_step",
    "train": "training/global_step",
    "validation": "validation/global_step",
}
"""Metric of each phase with the step of its last row, by which a resumed run knows which rows MLflow has."""
OUR_TAG: Final = "megatron_bapo.run"
POLL_S, RETRY_S, FINISH_TIMEOUT_S = 1.0, 30.0, 60.0
"""Seconds between looks at the file, after a failure, and for the last rows at the end of the run."""
ROWS_AT_ONCE, MAX_METRICS, MAX_PARAMS, MAX_KEY, MAX_VALUE = 64, 1000, 100, 250, 6000
"""MLflow's limits of a request and of its texts, and the number of rows that are read at once."""
ENVIRONMENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the URL would have the URI's credentials
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the thread itself tries again
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}
"""Variables that the package reads, where the environment does not set them."""


@contextmanager
def following_to_mlflow(config: Config, directory: RunDirectory, warn: Callable[[str], None]) -> Iterator[None]:
    """Send the run's metrics to MLflow in this context, if that is configured, and how the run has ended at its end.

    `warn` gets the first failure to reach MLflow.
    """
    if config.logging.mlflow is None:
        yield
        return
    sink, status = MlflowSink(config, directory, warn), "FAILED"
    try:
        yield
        status = "FINISHED" if directory.is_finished else "KILLED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        sink.close(status)


class MlflowSink:
    """Creates or continues an MLflow run and sends the rows of metrics.jsonl to it, until it is closed."""

    def __init__(self, config: Config, directory: RunDirectory, warn: Callable[[str], None]) -> None:
        self._config, self._directory, self._warn = config, directory, warn
        self._rows = RowFollower(directory.metrics)
        self._unsent: list[MetricsRow] = []
        self._client: Any = None
        self._run_id, self._start_ms = "", 0
        self._steps: dict[str, float] = {}
        """Step of the last row that MLflow has, by the phase's metric."""
        self._failure: str | None = None
        self._warned = False
        self._status: Status | None = None
        self._closing = Event()
        self._thread = Thread(target=self._follow, name="mlflow", daemon=True)
        self._thread.start()

    def close(self, status: Status) -> None:
        """Send the last rows and how the run has ended; warn if MLflow does not take them."""
        self._status = status
        self._closing.set()
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive() or self._failure is not None:
            why = self._failure or f"it has not taken them within {FINISH_TIMEOUT_S:.0f} s"
            self._warn(f"MLflow lacks the last metrics and that the run is {status}: {why}. {self._kept()}")

    def _kept(self) -> str:
        return f"{self._directory.metrics} has every metric; the next start of this run sends what is missing"

    def _follow(self) -> None:
        with closing(self._rows):
            self._follow_rows()

    def _follow_rows(self) -> None:
        pause = 0.0
        ended = False
        while not ended:
            ended = self._closing.wait(pause)
            try:
                if self._client is None:
                    self._client = self._connect()
                while self._send():
                    pass
                if ended:
                    self._client.set_terminated(self._run_id, self._status)
                pause, self._failure = POLL_S, None
            except Exception as error:  # of the package, the network or the server; training goes on without them
                pause, self._failure = RETRY_S, _message(error)
                if not self._warned and not ended:
                    self._warned = True
                    self._warn(f"logging.mlflow: {self._failure}. Training goes on; {self._kept()}")

    def _connect(self) -> Any:
        """Create the run, or continue the one with our tag; return MLflow's client."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        settings, ours = self._config.logging.mlflow, tracker_id(self._directory.mlflow_id)
        assert settings is not None, "the sink needs logging.mlflow"
        client = MlflowClient(tracking_uri=settings.resolved_uri(self._config.run_dir))
        experiment = client.get_experiment_by_name(settings.experiment)
        number = client.create_experiment(settings.experiment) if experiment is None else experiment.experiment_id
        found = client.search_runs([number], f"tags.`{OUR_TAG}` = '{ours}'", max_results=1)
        if found:
            run = found[0]
            client.update_run(run.info.run_id, status="RUNNING")
        else:
            name = settings.run_name or self._directory.root.resolve().name
            run = client.create_run(number, run_name=name, tags={**settings.tags, OUR_TAG: ours})
        self._run_id, self._start_ms = run.info.run_id, run.info.start_time
        self._steps = {name: run.data.metrics[name] for name in STEP_METRICS.values() if name in run.data.metrics}
        self._send_configuration(client, run.data.params)
        return client

    def _send_configuration(self, client: Any, known: Mapping[str, str]) -> None:
        """Send the keys of the configuration as parameters.

        MLflow never changes a parameter. A value that a resumed run changes becomes a tag.
        """
        from mlflow.entities import Param, RunTag

        values = dict(_parameters(self._config))
        new = [Param(name, value) for name, value in values.items() if name not in known]
        for part in _parts(new, MAX_PARAMS):
            client.log_batch(self._run_id, params=part)
        changed = [
            RunTag(f"changed.{name}", value) for name, value in values.items() if known.get(name, value) != value
        ]
        for part in _parts(changed, MAX_PARAMS):
            client.log_batch(self._run_id, tags=part)

    def _send(self) -> bool:
        """Send the next rows of the file; return False at its end."""
        from mlflow.entities import Metric

        if not self._unsent:
            self._unsent = self._rows.read(ROWS_AT_ONCE)
        metrics, steps = [], dict(self._steps)
        for row in self._unsent:
            own, step = STEP_METRICS[row["phase"]], row["step"]
            if step <= steps.get(own, -1):
                continue  # a resumed run repeats it
            # Times that are the same at every attempt let MLflow recognize a metric that it has got before.
            time_ms = self._start_ms + round(1000 * row["time_s"])
            values = {metric_name(name): value for name, value in tracker_values(row).items()}
            metrics += [Metric(name, value, time_ms, step) for name, value in {**values, own: step}.items()]
            steps[own] = step
        for part in _parts(metrics, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=part)
        self._steps, was_end, self._unsent = steps, not self._unsent, []
        return not was_end


class RowFollower:
    """Reads the rows that are appended to a file of a JsonlSink, from its first one on.

    When a resumed run has replaced the file, it reads from the first row again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def read(self, limit: int) -> list[Any]:
        """Return the next complete rows, at most `limit`; none if there is no file."""
        if self._file is not None and self._is_replaced(self._file):
            self.close()
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open("rb")
        rows, line = [], b""
        while len(rows) < limit and (line := self._file.readline()).endswith(b"\n"):
            rows.append(json.loads(line))
        if line and not line.endswith(b"\n"):  # it is being written
            self._file.seek(-len(line), os.SEEK_CUR)
        return rows

    def _is_replaced(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except OSError:  # it was removed, perhaps by another host
            return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def metric_name(name: str) -> str:
    """Return the name with the characters that MLflow takes, `val/mean_at_4` for `val/mean@4` as in verl."""
    taken = re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"), flags=re.ASCII)
    return "/".join(part for part in taken.split("/") if part.strip("."))[:MAX_KEY]


def _parameters(config: Config) -> Iterator[tuple[str, str]]:
    for name, value in flattened(config.model_dump(mode="json"), ""):
        yield metric_name(name), visible(value if isinstance(value, str) else json.dumps(value), MAX_VALUE)


def _parts(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (entries[start : start + size] for start in range(0, len(entries), size))


def _message(error: Exception) -> str:
    first_line, _, _ = without_credentials(str(error)).partition("\n")
    return visible(f"{type(error).__name__}: {first_line}", 400)
