"""Tests of launch/torchrun_node.sh with a stub of Python: refused input, signals and the end of a run."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_bapo.cluster.run_end import FILE, RunEnd, StopRequest
from tests.ports import free_port
from tests.processes import command_line
from tests.unit.launch.stubbed import LAUNCH, LIMIT_S, executable, kill_all, running, wait_for, write_token

pytestmark = pytest.mark.slow
STUB_PYTHON = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["STUB"])
with (here / "calls").open("a") as calls:
    print(*sys.argv[1:], file=calls)
if "train" in sys.argv:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        signal.signal(getattr(signal, name), lambda number, _: (here / signal.Signals(number).name).touch())
    (here / "trains").touch()
    while not list(here.glob("SIG*")):
        time.sleep(0.05)
    time.sleep(0.5)
    sys.exit(130)
if "RAY_FAILS" in os.environ:
    sys.exit(7)
(here / "ray_starts").touch()
time.sleep(60)
"""


def ray_of(node: subprocess.Popen) -> psutil.Process:
    """Return the process that starts Ray on this node."""
    return next(each for each in psutil.Process(node.pid).children(recursive=True) if "start" in command_line(each))


def wait_until_made(request: StopRequest) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not request.is_made:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NNODES": ""}, "NNODES= must be the number of nodes"),
        ({"NNODES": "two"}, "NNODES=two must be the number of nodes"),
        ({"NODE_RANK": ""}, "NODE_RANK= must be this node's number, from 0 to 1"),
        ({"NODE_RANK": "2"}, "NODE_RANK=2 must be this node's number, from 0 to 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR must be the address of node 0"),
        ({"MASTER_ADDR": "no-such-host.invalid"}, "MASTER_ADDR=no-such-host.invalid cannot be resolved"),
        ({"MASTER_ADDR": "fd00::1"}, "MASTER_ADDR=fd00::1 cannot be resolved to an IPv4 address"),
        ({"MASTER_ADDR": "127.0.1.1"}, "MASTER_ADDR=127.0.1.1 is 127.0.1.1 here, which other nodes cannot reach"),
        ({"MASTER_ADDR": "127.0.1.1", "NODE_RANK": "1"}, "which other nodes cannot reach"),
        ({"RAY_AUTH_TOKEN_PATH": ""}, "RAY_AUTH_TOKEN_PATH must name a file"),
    ],
    ids=str,
)
def test_a_torchrun_node_without_a_reachable_master_or_a_secret_says_so(
    environment: dict[str, str], expected: str, tmp_path: Path
) -> None:
    settings = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "192.0.2.1", "PATH": os.environ["PATH"]}
    settings |= {"RAY_AUTH_TOKEN_PATH": str(write_token(tmp_path / "token")), "TMPDIR": str(tmp_path)}
    script = [LAUNCH / "torchrun_node.sh", "config.yaml"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, env=settings | environment)
    assert done.returncode == 2
    assert expected in done.stderr
    assert list(tmp_path.glob("bapo-*")) == []


def own_address() -> str:
    """Return an address by which other machines may reach this one, if it has one."""
    own = [a.address for every in psutil.net_if_addrs().values() for a in every if a.family == socket.AF_INET]
    return next((each for each in own if not each.startswith("127.")), "127.0.0.1")


def node_zero(folder: Path, **settings: str) -> dict[str, str]:
    """Return the environment of torchrun_node.sh on the only node of a run, with a link to the secret."""
    (folder / "link").symlink_to(write_token(folder / "token"))
    return {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(folder),
        "STUB": str(folder),
        "BAPO_PYTHON": str(executable(folder / "python", STUB_PYTHON)),
        "RAY_AUTH_TOKEN_PATH": str(folder / "link"),
        "NNODES": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": own_address(),
        "MASTER_PORT": str(free_port()),
        **settings,
    }


TORCHRUN_NODE: list[Path | str] = [LAUNCH / "torchrun_node.sh", "config.yaml"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM], ids=str)
def test_a_signal_to_a_torchrun_node_reaches_the_run_once_and_ray_runs_until_it_has_saved(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The head takes the address by which other nodes reach it."""
    environment = node_zero(tmp_path)
    with running(TORCHRUN_NODE, environment) as node:
        wait_for(tmp_path / "trains")
        wait_for(tmp_path / "ray_starts")
        os.killpg(node.pid, number)  # as a terminal does
        assert node.wait(timeout=LIMIT_S) == 130
    assert [path.name for path in tmp_path.glob("SIG*")] == ["SIGTERM"]
    calls = (tmp_path / "calls").read_text()
    assert f"start --node-ip-address={own_address()} " in calls
    assert f"--head --port={environment['MASTER_PORT']}" in calls
    assert list(tmp_path.glob("bapo-*")) == []


def test_a_signal_to_a_torchrun_node_that_does_not_know_its_run_yet_reaches_it(tmp_path: Path) -> None:
    """Bash sources BASH_ENV, here with a wait before one command of the script."""
    wait = "until [[ -e $STUB/goes-on ]]; do sleep 0.05; done"
    (tmp_path / "slow.sh").write_text(f"trap '[[ $BASH_COMMAND != \"run=\\$!\" ]] || {wait}' DEBUG\n")
    with running(TORCHRUN_NODE, node_zero(tmp_path, BASH_ENV=str(tmp_path / "slow.sh"))) as node:
        wait_for(tmp_path / "trains")
        node.terminate()
        (tmp_path / "goes-on").touch()
        assert node.wait(timeout=LIMIT_S) == 130
    assert [path.name for path in tmp_path.glob("SIG*")] == ["SIGTERM"]


def test_a_torchrun_node_ends_its_run_when_its_own_ray_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        TORCHRUN_NODE, env=node_zero(tmp_path, RAY_FAILS="1"), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7
    assert "Ray on this node has ended before the run" in done.stderr


def test_a_log_to_which_a_torchrun_node_appends_keeps_what_it_has(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("the first attempt\n")
    with log.open("a") as file:
        environment = node_zero(tmp_path, RAY_FAILS="1")
        subprocess.run(TORCHRUN_NODE, env=environment, stdout=file, stderr=file, timeout=60, check=False)
    assert log.read_text().startswith("the first attempt\n")
    assert "Ray on this node has ended before the run" in log.read_text()


def test_a_torchrun_node_does_not_start_on_a_port_that_another_run_uses(tmp_path: Path) -> None:
    with socket.create_server((own_address(), 0)) as other:
        port = str(other.getsockname()[1])
        done = subprocess.run(
            TORCHRUN_NODE, env=node_zero(tmp_path, MASTER_PORT=port), capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 2
    assert f"port {port} of {own_address()} is in use" in done.stderr
    assert "start" not in (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else True


def test_a_run_on_one_node_whose_name_is_a_loopback_address_uses_localhost(tmp_path: Path) -> None:
    """Debian gives a machine's own name the address 127.0.1.1."""
    with running(TORCHRUN_NODE, node_zero(tmp_path, MASTER_ADDR="127.0.1.1")) as node:
        wait_for(tmp_path / "trains")
        wait_for(tmp_path / "ray_starts")
        node.terminate()
        assert node.wait(timeout=LIMIT_S) == 130
    assert "start --node-ip-address=127.0.0.1 " in (tmp_path / "calls").read_text()


def reachable_head(folder: Path) -> dict[str, str]:
    """Return the environment of a node that reaches the head 192.0.2.2 from its address 192.0.2.7."""
    executable(folder / "ip", "#!/usr/bin/env bash\necho '192.0.2.2 dev eth0 src 192.0.2.7 uid 0'\n")
    executable(folder / "timeout", "#!/usr/bin/env bash\n")
    return {"PATH": f"{folder}:{os.environ['PATH']}", "MASTER_ADDR": "192.0.2.2", "RAY_ADDRESS": "192.0.2.2:16391"}


def test_a_node_joins_by_the_address_from_which_it_reaches_the_head(tmp_path: Path) -> None:
    """The head's route is any that leaves the loopback interface."""
    with running([LAUNCH / "ray_node.sh"], node_zero(tmp_path, **reachable_head(tmp_path))) as node:
        wait_for(tmp_path / "ray_starts")
        node.terminate()
        node.wait(timeout=LIMIT_S)
    calls = (tmp_path / "calls").read_text()
    assert "--node-ip-address=192.0.2.7 " in calls
    assert "--address=192.0.2.2:16391" in calls


def test_the_files_of_a_killed_torchrun_node_are_removed_by_the_next_one_on_its_host(tmp_path: Path) -> None:
    """In a shared folder whose locks count on one host only, those of another host may still be in use."""
    (foreign := tmp_path / "bapo-token-x1").mkdir()
    (foreign / "OWNER.lock").write_text("another\n")
    environment = node_zero(tmp_path)
    with running(TORCHRUN_NODE, environment) as node:
        wait_for(tmp_path / "trains")
        wait_for(tmp_path / "ray_starts")
        kill_all(psutil.Process(node.pid))
    assert len(list(tmp_path.glob("bapo-token-*"))) == 2
    for name in ("trains", "ray_starts", "link"):
        (tmp_path / name).unlink()
    with running(TORCHRUN_NODE, node_zero(tmp_path)) as node:
        wait_for(tmp_path / "trains")
        wait_for(tmp_path / "ray_starts")
        node.terminate()
        assert node.wait(timeout=LIMIT_S) == 130
    assert list(tmp_path.glob("bapo-*")) == [foreign]


@pytest.fixture
def other_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen, psutil.Process]]:
    """A node of a run whose head is another one, and the process that starts Ray there."""
    with running(TORCHRUN_NODE, node_zero(tmp_path, NNODES="2", NODE_RANK="1", **reachable_head(tmp_path))) as node:
        wait_for(tmp_path / "ray_starts")
        ray = ray_of(node)
        monkeypatch.setenv(FILE, ray.environ()[FILE])  # as in the actors that Ray starts there
        yield node, ray


@pytest.mark.parametrize("exit_code", [0, 130])
def test_another_node_of_a_torchrun_run_ends_with_the_runs_exit_code_as_soon_as_it_is_told(
    exit_code: int, tmp_path: Path, other_node: tuple[subprocess.Popen, psutil.Process]
) -> None:
    node, ray = other_node
    RunEnd().write(exit_code)
    assert node.wait(timeout=LIMIT_S) == exit_code
    assert not ray.is_running()
    assert node.stderr is not None
    assert f"the run has ended with exit code {exit_code}" in node.stderr.read()
    assert list(tmp_path.glob("bapo-*")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=str)
def test_another_node_of_a_torchrun_run_that_gets_a_signal_keeps_ray_until_the_run_has_saved(
    number: signal.Signals, other_node: tuple[subprocess.Popen, psutil.Process]
) -> None:
    node, ray = other_node
    request = StopRequest()
    assert not request.is_made
    node.send_signal(number)
    wait_until_made(request)
    assert node.poll() is None
    assert ray.is_running()
    RunEnd().write(130)
    assert node.wait(timeout=LIMIT_S) == 130
    assert not ray.is_running()


@pytest.mark.parametrize("num_signals", [1, 2])
def test_another_node_of_a_torchrun_run_ends_at_once_by_a_signal_before_the_run_starts_or_by_a_second_one(
    num_signals: int, tmp_path: Path, other_node: tuple[subprocess.Popen, psutil.Process]
) -> None:
    node, _ = other_node
    if num_signals == 2:
        request = StopRequest()
        node.terminate()
        wait_until_made(request)
    node.terminate()
    assert node.wait(timeout=LIMIT_S) == 143
    assert list(tmp_path.glob("bapo-*")) == []
