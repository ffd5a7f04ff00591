import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.sinks import MetricsRow, Phase
from megatron_bapo.metrics.wandb_sink import WandbSink
from tests.unit.config.examples import config
from tests.unit.metrics.wandb_files import WandbFiles, read_wandb

KEY = "0123456789abcdef" * 2 + "01234567"
ROWS: list[tuple[Phase, int, dict[str, float | None]]] = [
    ("warm_start", 1, {"actor/loss": 3.0}),
    ("validation", 0, {"val/mean@4": 0.25, "response_length/mean": 7.0}),
    ("train", 1, {"actor/loss": 0.5, "response_length/mean": 9.0, "actor/bapo_clip_low": None}),
    ("train", 2, {"actor/loss": math.nan, "response_length/mean": 8.0}),
]
HOSTILE = "<img src=x onerror=alert(1)> \\u202e & [a](javascript:b) ]]>"
COLUMNS = ("step", "response", "reward")
TABLES: dict[int, list[list[list[int | str | float | None]]]] = {
    2: [[[1, HOSTILE, 1.0]], [[2, "", None]]],
    4: [[[3, "last", 0.5]]],
}
"""Tables by the number of the row before which they come."""


def settings(run_dir: Path, **values: str | None) -> Config:
    return config(run_dir=str(run_dir), logging__wandb={"project": "reasoning", "mode": "offline", **values})


def row(phase: Phase, step: int, metrics: dict[str, float | None]) -> MetricsRow:
    return {"step": step, "phase": phase, "time_s": 1.5, "metrics": metrics}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of a run that was resumed after its third row."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_API_KEY", KEY)
        for start, end in ((0, 3), (3, 4)):
            sink = WandbSink(settings(folder, name="first"), "abcd1234", num_rows=start)
            for number in range(start, end + 1):
                for rows in TABLES.get(number, ()):
                    sink.add_table("rollouts", COLUMNS, rows)
                if number < end:
                    sink.write(row(*ROWS[number]))
            sink.close()
        wandb.teardown()  # as at a process's end: files are complete
    return folder


@pytest.fixture
def written(run_dir: Path) -> WandbFiles:
    return read_wandb(run_dir)


def test_a_resumed_run_is_the_same_wandb_run(written: WandbFiles) -> None:
    assert written.runs == [("reasoning", "abcd1234", "first")] * 2


def test_rows_are_read_back_in_order_with_their_phases_steps(written: WandbFiles) -> None:
    assert [number for number, _ in written.rows] == [0, 1, 2, 3]
    warm_start, validation, train, _ = (values for _, values in written.rows)
    assert warm_start == {"warm_start/global_step": 1, "warm_start/actor/loss": 3.0}
    assert validation == {"training/global_step": 0, "val/mean@4": 0.25, "validation/response_length/mean": 7.0}
    assert train == {"training/global_step": 1, "actor/loss": 0.5, "response_length/mean": 9.0}


def test_a_metrics_x_axis_is_its_phases_steps(written: WandbFiles) -> None:
    assert written.axes["actor/loss"] == written.axes["val/mean@4"] == "training/global_step"
    assert written.axes["warm_start/actor/loss"] == "warm_start/global_step"


def test_a_table_goes_with_the_next_row_or_at_the_end_with_the_last_one(written: WandbFiles) -> None:
    assert [(step, name) for step, name, _ in written.tables] == [(2, "rollouts"), (3, "rollouts")]
    (_, _, two_steps), (_, _, at_the_end) = written.tables
    assert two_steps == [{"step": 1, "response": HOSTILE, "reward": 1.0}, {"step": 2, "response": "", "reward": None}]
    assert at_the_end == [{"step": 3, "response": "last", "reward": 0.5}]


def test_the_key_is_nowhere_in_the_run_directory(run_dir: Path) -> None:
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) > 2
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


MODE_OF_ENVIRONMENT = """
import sys
from pathlib import Path
from megatron_bapo.metrics.wandb_sink import WandbSink
from tests.unit.metrics.test_wandb_sink import ROWS, row, settings
sink = WandbSink(settings(Path(sys.argv[1]), mode=None), "abcd1234")
sink.write(row(*ROWS[0]))
sink.close()
"""


def in_a_process(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process without a key, because wandb caches the key and the settings of the environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(folder), "WANDB_BASE_URL": "http://127.0.0.1:9", **variables}  # where no server listens
    command = [sys.executable, "-c", code, str(folder)]
    return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.mark.slow
def test_wandb_mode_offline_writes_to_the_run_directory_without_a_key(tmp_path: Path) -> None:
    ended = in_a_process(MODE_OF_ENVIRONMENT, tmp_path, WANDB_MODE="offline")
    assert ended.returncode == 0, ended.stderr
    assert read_wandb(tmp_path).rows == [(0, {"warm_start/global_step": 1, "warm_start/actor/loss": 3.0})]


@pytest.mark.slow
def test_a_wandb_mode_that_wandb_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    ended = in_a_process(MODE_OF_ENVIRONMENT, tmp_path, WANDB_MODE="off")
    assert "UserError: logging.wandb:" in ended.stderr
    assert "'online', 'offline'" in ended.stderr


WITHOUT_KEY = """
import sys
from pathlib import Path
from megatron_bapo.metrics.wandb_sink import WandbSink
from tests.unit.metrics.test_wandb_sink import settings
WandbSink(settings(Path(sys.argv[1]), mode="online"), "abcd1234")
"""


@pytest.mark.slow
def test_without_a_key_the_error_names_the_remedy(tmp_path: Path) -> None:
    ended = in_a_process(WITHOUT_KEY, tmp_path)
    assert "UserError: logging.wandb:" in ended.stderr
    assert "set WANDB_API_KEY or run `wandb login`, or set logging.wandb.mode=offline" in ended.stderr


RESUMED = """
import sys
from pathlib import Path
from megatron_bapo.metrics.wandb_sink import WandbSink
from tests.unit.metrics.test_wandb_sink import ROWS, row, settings
sink = WandbSink(settings(Path(sys.argv[1]), mode="online"), "abcd1234", num_rows=int(sys.argv[2]))
sink.write(row(*ROWS[0]))
sink.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [0, 7])
def test_only_a_run_that_has_rows_goes_on_without_the_server(num_rows: int, tmp_path: Path) -> None:
    code = RESUMED.replace("sys.argv[2]", str(num_rows))
    ended = in_a_process(code, tmp_path, WANDB_API_KEY=KEY, WANDB_INIT_TIMEOUT="2")
    if num_rows:
        assert ended.returncode == 0, ended.stderr
        assert "the run goes on offline, see `wandb sync`" in ended.stdout
        assert [step for step, _ in read_wandb(tmp_path).rows] == [7]
    else:
        assert "RunError: logging.wandb:" in ended.stderr
        assert "logging.wandb.mode=offline trains without its server" in ended.stderr
