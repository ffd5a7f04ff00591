"""Tests of the scripts in launch/ and tools/: shellcheck, refused input, signals and addresses."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml
from jsonschema import Draft202012Validator

from megatron_bapo.cluster.run_end import FILE, RunEnd, StopRequest

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.s*"), *(ROOT / "tools").glob("*.sh")])
pytestmark = pytest.mark.slow
RAY_NODE = ROOT / "launch" / "ray_node.sh"
LIMIT_S = 120
"""Timeout of a script that ends within seconds on an idle machine."""
SRUN = """#!/usr/bin/env bash
if [[ $* == *ray_node.sh ]]; then trap 'exit 0' USR2; while :; do sleep 0.05; done; fi
num=0
trap 'num=$((num + 1)); ((num < 2)) || exit 130' USR1 # as the launcher in a long step
touch "$BAPO_LOGS/runs"
while :; do sleep 0.05; done
"""
SCONTROL = """#!/usr/bin/env bash
case $* in
    "show hostnames"*) echo node-1 ;;
    "show node"*) echo "NodeName=node-1 NodeAddr=127.0.0.1 " ;;
    *) echo "$*" >>"$BAPO_LOGS/asked" ;;
esac
"""


def test_shellcheck_finds_nothing() -> None:
    assert len(SCRIPTS) >= 6
    checker = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([checker, *SCRIPTS], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_there_are_no_hyperparameters_in_scripts() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert not [key for key in ("batch_size", "world_size=", "lr=", "total_steps", "rollout.") if key in text]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RAY_ADDRESS": "head"}, "RAY_ADDRESS=head must be HOST:PORT"),
        ({"RAY_ADDRESS": ""}, "RAY_ADDRESS= must be HOST:PORT"),
        ({"RAY_ADDRESS": ":20005"}, "RAY_ADDRESS=:20005 must be HOST:PORT"),
        ({"RAY_ADDRESS": "[fd00::1]:6379"}, "RAY_ADDRESS=[fd00::1]:6379 has an IPv6 address; nodes need IPv4"),
        (
            {"RAY_AUTH_TOKEN_PATH": "secret", "BAPO_NODE_ADDRESS": "fd00::2"},
            "this node's address fd00::2 is an IPv6 address; nodes need IPv4 addresses",
        ),
        ({"RAY_AUTH_TOKEN_PATH": "secret", "BAPO_PYTHON": "/no/python"}, "BAPO_PYTHON=/no/python is not an executable"),
        ({"RAY_AUTH_TOKEN_PATH": "secret", "BAPO_NODE_ADDRESS": "127.0.1.1"}, "127.0.1.1 is a loopback address"),
        (
            {"RAY_AUTH_TOKEN_PATH": "secret", "BAPO_NODE_ADDRESSES": "n1 127.0.0.1", "SLURMD_NODENAME": "n2"},
            "BAPO_NODE_ADDRESSES has no address of node n2",
        ),
        ({}, "RAY_AUTH_TOKEN_PATH must name a file with the cluster's secret"),
        ({"RAY_AUTH_TOKEN_PATH": "open"}, "open is readable by others: chmod 600 it"),
    ],
    ids=str,
)
def test_ray_is_not_started_without_an_address_and_a_protected_secret(
    environment: dict[str, str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "open").write_text("s3cret")
    (tmp_path / "open").chmod(0o644)
    write_token(tmp_path / "secret")
    done = subprocess.run(
        [RAY_NODE],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "RAY_ADDRESS": "127.0.0.1:6379", **environment},
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert "s3cret" not in done.stderr


def write_token(path: Path) -> Path:
    path.touch(mode=0o600)
    path.write_text("s3cret")
    return path


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
    script = [ROOT / "launch" / "torchrun_node.sh", "config.yaml"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, env=settings | environment)
    assert done.returncode == 2
    assert expected in done.stderr
    assert list(tmp_path.glob("bapo-*")) == []


def test_the_kuberay_job_is_valid_by_kuberays_own_schema() -> None:
    definition = yaml.safe_load(Path(__file__).with_name("rayjob.schema.yaml").read_text())
    job = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())
    check = Draft202012Validator(definition).iter_errors
    assert [error.message for error in check(job)] == []
    job["spec"]["rayClusterSpec"]["authOption"] = job["spec"]["rayClusterSpec"].pop("authOptions")
    assert ["'authOption' was unexpected" in error.message for error in check(job)] == [True]


def test_rays_servers_have_the_launchers_settings_on_every_kind_of_cluster() -> None:
    """Of those in cluster/ray_cluster.py that servers read, too."""
    code = (ROOT / "megatron_bapo" / "cluster" / "ray_cluster.py").read_text()
    found = dict(re.findall(r'"(RAY_[a-z]\w+)": "(\d+)"', code))
    assert "RAY_prestart_worker_first_driver" in found
    del found["RAY_enable_metrics_collection"]  # by cluster/ray_start.py, and KubeRay has metrics of its own
    exported = dict(re.findall(r"(RAY_[a-z]\w+)=(\d+)", RAY_NODE.read_text()))
    assert exported == found
    container = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    pod = container["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {each["name"]: each["value"] for each in pod["env"] if each["name"][4].islower()} == found


def test_the_kuberay_job_has_token_authentication_and_the_number_of_nodes_it_waits_for() -> None:
    job = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    num_nodes = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    *_, config, option, waited_for = job["spec"]["entrypoint"].split()
    assert (option, int(waited_for)) == ("--num-nodes", num_nodes)
    assert (ROOT / config).is_file()
    versions = (ROOT / "requirements.txt").read_text()
    assert f"ray[default]=={cluster['rayVersion']}" in versions or f"ray=={cluster['rayVersion']}" in versions


STARTING_SRUN = SRUN.replace("trap 'num=", "true 'num=")
"""A launcher without a handler for the signal."""
SAVING_SRUN = """#!/usr/bin/env bash
if [[ $* == *ray_node.sh ]]; then
    trap 'echo "Ray ends" >>"$BAPO_LOGS/events"; exit 0' USR2 TERM
    while :; do sleep 0.05; done
fi
trap 'echo "asked to save" >>"$BAPO_LOGS/events"; asked=yes' USR1
touch "$BAPO_LOGS/runs"
while [[ -z ${asked:-} ]]; do sleep 0.05; done
for _ in {1..20}; do sleep 0.05; done
echo saved >>"$BAPO_LOGS/events"
exit 130
"""
SLOW_SCONTROL = SCONTROL.replace('"show node"*)', '"show node"*) touch "$BAPO_LOGS/addresses"; sleep 1;')
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


def executable(path: Path, script: str) -> Path:
    path.write_text(script)
    path.chmod(0o755)
    return path


@contextmanager
def running(command: list[Path | str], environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """Start the command in its own session; remaining processes are killed at the end."""
    process = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        for each in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            each.kill()
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def job(
    folder: Path,
    *,
    is_saved: bool,
    num_restarts: int = 0,
    job_id: int = 7,
    srun: str = SRUN,
    scontrol: str = SCONTROL,
    python: Path | str = "true",
    **more: str,
) -> AbstractContextManager[subprocess.Popen]:
    """Run a Slurm job of one node, with its logs in `folder`/run/slurm and `more` environment variables."""
    logs = folder / "run" / "slurm"
    logs.mkdir(parents=True)
    if is_saved:
        (folder / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    executable(folder / "srun", srun)
    executable(folder / "scontrol", scontrol)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "BAPO_LAUNCH": str(ROOT / "launch"),
        "BAPO_LOGS": str(logs),
        "BAPO_PYTHON": str(python),
        "BAPO_SIGNAL_S": "2",
        **dict.fromkeys(
            ("RAY_AUTH_TOKEN", "SLURM_JWT", "RAY_REDIS_PASSWORD", "WANDB_API_KEY", "OPENAI_LOGIN"), "s3cret"
        ),
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NODELIST": "node-1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_RESTART_COUNT": str(num_restarts),
        **more,
    }
    script = ["bash", "-c", "umask 027; exec bash $0 config.yaml", ROOT / "launch" / "slurm.sbatch"]
    return running(script, environment)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.05)


def asked_of_slurm(folder: Path) -> str:
    asked = folder / "run" / "slurm" / "asked"
    return asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize(
    ("is_saved", "num_restarts", "asked"), [(True, 9, "requeue 7\n"), (False, 0, "requeue 7\n"), (False, 3, "")]
)
def test_a_job_out_of_time_is_requeued_but_only_three_times_without_a_checkpoint_and_logs_no_secret(
    is_saved: bool, num_restarts: int, asked: str, tmp_path: Path
) -> None:
    logs = tmp_path / "run" / "slurm"
    with job(tmp_path, is_saved=is_saved, num_restarts=num_restarts) as started:
        wait_for(logs / "runs")
        start_s = time.monotonic()
        started.send_signal(signal.SIGUSR1)
        code = started.wait(timeout=LIMIT_S)
    assert time.monotonic() - start_s >= 1.0, "the step under way got its time"
    assert code == 130
    found = (logs / "7-environment.txt").read_text()
    assert "SLURM_JOB_NUM_NODES=1" in found
    assert "s3cret" not in found
    assert asked_of_slurm(tmp_path) == asked


def test_the_tasks_of_a_job_may_use_all_cores_and_its_head_has_no_ephemeral_port(tmp_path: Path) -> None:
    """By default Linux gives the ports from 32768 on to outgoing connections."""
    with job(tmp_path, is_saved=False, srun="#!/usr/bin/env bash\n", job_id=12001) as started:
        assert started.wait(timeout=LIMIT_S) == 0
    found = (tmp_path / "run" / "slurm" / "12001-environment.txt").read_text()
    assert "SLURM_CPU_BIND=none" in found
    assert "RAY_ADDRESS=127.0.0.1:20001" in found


def test_the_environment_of_a_job_lists_every_node_and_no_credentials_of_checkouts_and_indexes(tmp_path: Path) -> None:
    freeze = """#!/usr/bin/env bash
    echo '-e git+https://user:s3cret@s3cret@git.example.com/team/code.git@abc#egg=code'
    echo 'extra @ https://s3cret@index.example.com/extra-1.0.tar.gz'
    echo 'local @ git+ssh://git@git.example.com/team/local.git@abc'
    """
    two_nodes = SCONTROL.replace("echo node-1 ;;", "printf 'node-1\\nnode-2\\n' ;;").replace("127.0.0.1", "192.0.2.7")
    python = executable(tmp_path / "freeze", freeze)
    with job(tmp_path, is_saved=False, srun="#!/usr/bin/env bash\n", scontrol=two_nodes, python=python) as started:
        assert started.wait(timeout=LIMIT_S) == 0
    found = (tmp_path / "run" / "slurm" / "7-environment.txt").read_text()
    assert "BAPO_NODE_ADDRESSES=node-1 192.0.2.7\nnode-2 192.0.2.7\n" in found
    assert "s3cret" not in found
    assert "-e git+https://git.example.com/team/code.git@abc#egg=code" in found
    assert "extra @ https://index.example.com/extra-1.0.tar.gz" in found


def test_the_environment_of_a_job_has_no_credentials_of_an_editable_checkout(tmp_path: Path) -> None:
    """Pip prints the remote of the checkout."""
    git = ["git", "-C", str(checkout := tmp_path / "code"), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    (installed := tmp_path / "site" / "code-1.0.dist-info").mkdir(parents=True)
    checkout.mkdir()
    for command in (
        ["init", "--quiet"],
        ["commit", "--quiet", "--allow-empty", "--message=first"],
        ["remote", "add", "origin", "https://user:s3cret@git.example.com/team/code.git"],
    ):
        subprocess.run([*git, *command], check=True, timeout=60)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: code\nVersion: 1.0\n")
    (installed / "direct_url.json").write_text(f'{{"url": "{checkout.as_uri()}", "dir_info": {{"editable": true}}}}')
    site, no_step = str(tmp_path / "site"), "#!/usr/bin/env bash\n"
    with job(tmp_path, is_saved=False, srun=no_step, python=sys.executable, PYTHONPATH=site) as started:
        assert started.wait(timeout=LIMIT_S) == 0
    found = (tmp_path / "run" / "slurm" / "7-environment.txt").read_text()
    assert "-e git+https://git.example.com/team/code.git@" in found
    assert "s3cret" not in found


def test_a_job_that_is_preempted_while_its_launcher_starts_is_requeued(tmp_path: Path) -> None:
    with job(tmp_path, is_saved=True, srun=STARTING_SRUN) as started:
        wait_for(tmp_path / "run" / "slurm" / "runs")
        started.send_signal(signal.SIGUSR1)
        assert started.wait(timeout=LIMIT_S) == 130
    assert asked_of_slurm(tmp_path) == "requeue 7\n"


@pytest.mark.parametrize(
    ("number", "asked", "code"),
    [(signal.SIGUSR1, "requeue 7\n", 130), (signal.SIGUSR2, "", 0), (signal.SIGTERM, "", 0)],
)
def test_a_job_that_is_stopped_before_its_launcher_starts_does_not_start_it(
    number: signal.Signals, asked: str, code: int, tmp_path: Path
) -> None:
    with job(tmp_path, is_saved=True, scontrol=SLOW_SCONTROL) as started:
        wait_for(tmp_path / "run" / "slurm" / "addresses")
        started.send_signal(number)
        assert started.wait(timeout=LIMIT_S) == code
    assert not (tmp_path / "run" / "slurm" / "runs").exists()
    assert asked_of_slurm(tmp_path) == asked


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM], ids=str)
def test_a_job_that_is_told_to_end_lets_its_launcher_save_once_under_a_running_ray_and_succeeds_if_it_did(
    number: signal.Signals, is_saved: bool, tmp_path: Path
) -> None:
    logs = tmp_path / "run" / "slurm"
    with job(tmp_path, is_saved=is_saved, srun=SAVING_SRUN) as started:
        wait_for(logs / "runs")
        for _ in range(3):  # an impatient user repeats the request
            started.send_signal(number)
            time.sleep(0.2)
        assert started.wait(timeout=LIMIT_S) == (0 if is_saved else 130)
    assert (logs / "events").read_text().splitlines() == ["asked to save", "saved", "Ray ends"]
    assert asked_of_slurm(tmp_path) == ""


@pytest.mark.parametrize(
    ("address", "nodes", "expected"),
    [
        ("127.0.1.1", 2, "node node-1 has the address 127.0.1.1, which other nodes cannot reach"),
        ("no-such-host.invalid", 1, "node node-1 has no IPv4 address"),
        ("fd00::1", 2, "node node-1 has no IPv4 address"),
    ],
)
def test_a_job_does_not_start_on_a_node_that_others_cannot_reach(
    address: str, nodes: int, expected: str, tmp_path: Path
) -> None:
    names = " ".join(f"node-{number + 1}" for number in range(nodes))
    scontrol = SCONTROL.replace("echo node-1", f"printf '%s\\n' {names}").replace("127.0.0.1", address)
    with job(tmp_path, is_saved=False, scontrol=scontrol) as started:
        assert started.wait(timeout=LIMIT_S) == 2
        assert started.stderr is not None
        assert expected in started.stderr.read()
    assert not (tmp_path / "run" / "slurm" / ".token-7").exists()


def test_the_first_node_of_a_job_is_its_head_whichever_node_names_the_address_of_its_interface_first(
    tmp_path: Path,
) -> None:
    srun = "#!/usr/bin/env bash\n[[ $* != *ip\\ -4* ]] || printf 'node-2 192.0.2.8\\nnode-1 192.0.2.7\\n'\n"
    scontrol = SCONTROL.replace("echo node-1", "printf '%s\\n' node-1 node-2")
    with job(tmp_path, is_saved=False, srun=srun, scontrol=scontrol, BAPO_INTERFACE="ib0") as started:
        assert started.wait(timeout=LIMIT_S) == 0
    found = (tmp_path / "run" / "slurm" / "7-environment.txt").read_text()
    assert "BAPO_NODE_ADDRESSES=node-1 192.0.2.7\nnode-2 192.0.2.8\n" in found
    assert "RAY_ADDRESS=192.0.2.7:" in found


def test_a_job_ends_soon_after_ray_on_its_head_has_ended(tmp_path: Path) -> None:
    srun = SRUN.replace("trap 'exit 0' USR2; while", "exit 1; while")
    with job(tmp_path, is_saved=True, srun=srun) as started:
        assert started.wait(timeout=60) == 1
        assert started.stderr is not None
        assert "Ray has ended before the run" in started.stderr.read()


def test_only_the_secret_of_a_job_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    with job(tmp_path, is_saved=True) as started:
        logs = tmp_path / "run" / "slurm"
        wait_for(logs / "runs")
        modes = {path.name: oct(path.stat().st_mode)[-3:] for path in logs.iterdir()}
        started.send_signal(signal.SIGUSR1)
        started.wait(timeout=LIMIT_S)
    assert modes == {".token-7": "600", "7-environment.txt": "640", "runs": "640"}


def test_a_cancelled_job_whose_time_limit_comes_is_not_requeued(tmp_path: Path) -> None:
    with job(tmp_path, is_saved=True) as started:
        wait_for(tmp_path / "run" / "slurm" / "runs")
        started.send_signal(signal.SIGUSR2)
        time.sleep(0.3)
        started.send_signal(signal.SIGUSR1)  # gives up the step after BAPO_SIGNAL_S / 2
        assert started.wait(timeout=LIMIT_S) == 0
    assert asked_of_slurm(tmp_path) == ""


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
        "MASTER_PORT": "16391",
        **settings,
    }


TORCHRUN_NODE: list[Path | str] = [ROOT / "launch" / "torchrun_node.sh", "config.yaml"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGTERM], ids=str)
def test_a_signal_to_a_torchrun_node_reaches_the_run_once_and_ray_runs_until_it_has_saved(
    number: signal.Signals, tmp_path: Path
) -> None:
    """The head takes the address by which other nodes reach it."""
    with running(TORCHRUN_NODE, node_zero(tmp_path)) as node:
        wait_for(tmp_path / "trains")
        wait_for(tmp_path / "ray_starts")
        os.killpg(node.pid, number)  # as a terminal does
        assert node.wait(timeout=30) == 130
    assert [path.name for path in tmp_path.glob("SIG*")] == ["SIGTERM"]
    calls = (tmp_path / "calls").read_text()
    assert f"start --node-ip-address={own_address()} " in calls
    assert "--head --port=16391" in calls
    assert list(tmp_path.glob("bapo-*")) == []


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
        assert node.wait(timeout=30) == 130
    assert "start --node-ip-address=127.0.0.1 " in (tmp_path / "calls").read_text()


def reachable_head(folder: Path) -> dict[str, str]:
    """Return the environment of a node that reaches the head 192.0.2.2 from its address 192.0.2.7."""
    executable(folder / "ip", "#!/usr/bin/env bash\necho '192.0.2.2 dev eth0 src 192.0.2.7 uid 0'\n")
    executable(folder / "timeout", "#!/usr/bin/env bash\n")
    return {"PATH": f"{folder}:{os.environ['PATH']}", "MASTER_ADDR": "192.0.2.2", "RAY_ADDRESS": "192.0.2.2:16391"}


def test_a_node_joins_by_the_address_from_which_it_reaches_the_head(tmp_path: Path) -> None:
    """The head's route is any that leaves the loopback interface."""
    with running([RAY_NODE], node_zero(tmp_path, **reachable_head(tmp_path))) as node:
        wait_for(tmp_path / "calls")
        node.terminate()
        node.wait(timeout=30)
    calls = (tmp_path / "calls").read_text()
    assert "--node-ip-address=192.0.2.7 " in calls
    assert "--address=192.0.2.2:16391" in calls


def test_the_files_of_a_killed_torchrun_node_are_removed_by_the_next_one(tmp_path: Path) -> None:
    environment = node_zero(tmp_path)
    with running(TORCHRUN_NODE, environment) as node:
        wait_for(tmp_path / "trains")
        wait_for(tmp_path / "ray_starts")
        for each in (script := psutil.Process(node.pid), *script.children(recursive=True)):
            each.kill()
    assert len(list(tmp_path.glob("bapo-token-*"))) == 1
    for name in ("trains", "ray_starts", "link"):
        (tmp_path / name).unlink()
    with running(TORCHRUN_NODE, node_zero(tmp_path)) as node:
        wait_for(tmp_path / "trains")
        wait_for(tmp_path / "ray_starts")
        node.terminate()
        assert node.wait(timeout=30) == 130
    assert list(tmp_path.glob("bapo-*")) == []


@pytest.mark.parametrize("exit_code", [0, 130])
def test_another_node_of_a_torchrun_run_ends_with_the_runs_exit_code_as_soon_as_it_is_told(
    exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = node_zero(tmp_path, NNODES="2", NODE_RANK="1", **reachable_head(tmp_path))
    with running(TORCHRUN_NODE, environment) as node:
        wait_for(tmp_path / "ray_starts")
        ray = next(each for each in psutil.Process(node.pid).children(recursive=True) if "start" in each.cmdline())
        monkeypatch.setenv(FILE, ray.environ()[FILE])  # as in the actors that Ray starts there
        RunEnd().write(exit_code)
        assert node.wait(timeout=30) == exit_code
        assert not ray.is_running()
        assert node.stderr is not None
        assert f"the run has ended with exit code {exit_code}" in node.stderr.read()
    assert list(tmp_path.glob("bapo-*")) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=str)
def test_another_node_of_a_torchrun_run_that_gets_a_signal_keeps_ray_until_the_run_has_saved(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = node_zero(tmp_path, NNODES="2", NODE_RANK="1", **reachable_head(tmp_path))
    with running(TORCHRUN_NODE, environment) as node:
        wait_for(tmp_path / "ray_starts")
        ray = next(each for each in psutil.Process(node.pid).children(recursive=True) if "start" in each.cmdline())
        monkeypatch.setenv(FILE, ray.environ()[FILE])
        request = StopRequest()
        assert not request.is_made
        node.send_signal(number)
        deadline = time.monotonic() + LIMIT_S
        while not request.is_made:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert node.poll() is None
        assert ray.is_running()
        RunEnd().write(130)
        assert node.wait(timeout=30) == 130
        assert not ray.is_running()


@pytest.mark.parametrize("num_signals", [1, 2])
def test_another_node_of_a_torchrun_run_ends_at_once_by_a_signal_before_the_run_starts_or_by_a_second_one(
    num_signals: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = node_zero(tmp_path, NNODES="2", NODE_RANK="1", **reachable_head(tmp_path))
    with running(TORCHRUN_NODE, environment) as node:
        wait_for(tmp_path / "ray_starts")
        if num_signals == 2:
            ray = next(each for each in psutil.Process(node.pid).children(recursive=True) if "start" in each.cmdline())
            monkeypatch.setenv(FILE, ray.environ()[FILE])
            StopRequest()
        for _ in range(num_signals):
            node.terminate()
            time.sleep(1)
        assert node.wait(timeout=30) == 143
    assert list(tmp_path.glob("bapo-*")) == []


def test_pods_of_the_kuberay_job_have_time_to_save_before_they_are_killed() -> None:
    cluster = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert [pod["terminationGracePeriodSeconds"] for pod in pods] == [600, 600]


def test_pods_of_the_kuberay_job_may_lock_memory_for_rdma() -> None:
    cluster = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    containers = [
        container
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        for container in group["template"]["spec"]["containers"]
    ]
    added = [container["securityContext"]["capabilities"]["add"] for container in containers]
    assert added == [["IPC_LOCK"], ["IPC_LOCK"]]
