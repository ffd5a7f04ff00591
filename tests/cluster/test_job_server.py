"""A run as a Ray job: submitted to the job server, followed in its log, and stopped with its state saved."""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

from tests.cluster.launched import ENVIRONMENT, LAUNCH, train_steps, wait_for_step, write_config, write_token
from tests.ports import free_port

LIMIT_S = 180


@contextmanager
def port_in_use(port: int) -> Iterator[None]:
    """Take a port, as another cluster of this machine would, unless another process has it."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(socket.create_server(("", port)))
        yield


@contextmanager
def job_server(folder: Path) -> Iterator[dict[str, str]]:
    """Start a Ray head with a job server on the loopback interface; yields the environment that `ray job` needs."""
    port, job_port = free_port(), free_port()
    token = {"RAY_AUTH_TOKEN_PATH": str(write_token(folder))}
    temporary = tempfile.mkdtemp(prefix="bapo-")  # a short path, because Ray creates its sockets there
    head = {"RAY_ADDRESS": f"127.0.0.1:{port}", "BAPO_JOB_PORT": str(job_port), "RAY_TMPDIR": temporary}
    with (folder / "node.log").open("wb") as log:
        command = str(LAUNCH / "ray_node.sh")
        node = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT | token | head, cwd=folder)
    try:
        deadline = time.monotonic() + LIMIT_S
        # The job server listens before, and is started again with the others if one of them is too slow.
        while "Ray runtime started" not in (folder / "node.log").read_text():
            assert node.poll() is None, (folder / "node.log").read_text()
            assert time.monotonic() < deadline, (folder / "node.log").read_text()
            time.sleep(0.2)
        yield ENVIRONMENT | token | {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": f"http://127.0.0.1:{job_port}"}
    finally:
        node.terminate()
        node.wait(timeout=LIMIT_S)
        shutil.rmtree(temporary)


@contextmanager
def ray_job(environment: dict[str, str], *arguments: object) -> Iterator[subprocess.Popen]:
    """Run a subcommand of `ray job`."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def status_without_token(address: str) -> int:
    connection = HTTPConnection(address.removeprefix("http://"), timeout=LIMIT_S)
    connection.request("GET", "/api/jobs/")
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_job_of_a_ray_cluster_trains_and_stops_with_its_state_saved(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, run_dir)
    with port_in_use(DEFAULT_DASHBOARD_AGENT_LISTEN_PORT), job_server(tmp_path) as environment:
        train = (sys.executable, "-m", "megatron_bapo", "train", config, "--num-nodes", 1)
        with ray_job(environment, "submit", "--submission-id", "run", "--", *train) as submit:
            assert status_without_token(environment["RAY_ADDRESS"]) == HTTPStatus.UNAUTHORIZED
            wait_for_step(run_dir, 1, tmp_path)
            with ray_job(environment, "stop", "run") as stop:
                stopped = stop.communicate(timeout=LIMIT_S)[0]
            followed = submit.communicate(timeout=LIMIT_S)[0]
    assert "was stopped" in stopped
    assert "Stopped; the state is saved" in followed
    saved = json.loads(max((run_dir / "checkpoints").glob("step-*")).joinpath("state.json").read_text())["step"]
    assert saved == max(train_steps(run_dir))
