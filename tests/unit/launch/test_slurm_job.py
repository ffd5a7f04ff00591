"""Tests of launch/slurm.sbatch with stubs of Slurm's commands: signals, addresses, requeueing and logs."""

import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.unit.launch.stubbed import LAUNCH, LIMIT_S, executable, running, wait_for

pytestmark = pytest.mark.slow
SRUN = """#!/usr/bin/env bash
if [[ $* == *ray_node.sh ]]; then trap 'exit 0' USR2; while :; do sleep 0.05; done; fi
num=0
trap 'touch "$BAPO_LOGS/asked-to-save"; num=$((num + 1)); ((num < 2)) || exit 131' USR1 # as the launcher in a long step
touch "$BAPO_LOGS/runs"
while :; do sleep 0.05; done
"""
SCONTROL = """#!/usr/bin/env bash
nodes=(node-1)
case $* in
    "show hostnames"*) printf '%s\\n' "${nodes[@]}" ;;
    "show node"*) printf 'NodeName=%s CPUTot=8 NodeAddr=127.0.0.1 Port=1\\n' "${nodes[@]}" ;;
    "show job"*) echo "JobId=7 PreemptTime=None" ;;
    *) echo "$*" >>"$BAPO_LOGS/asked" ;;
esac
"""
PREEMPTED_SCONTROL = SCONTROL.replace("PreemptTime=None", "PreemptTime=2026-01-01T00:00:00")
STARTING_SRUN = SRUN.replace("trap 'touch", "true 'touch")
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
SLOW_SCONTROL = SCONTROL.replace(
    '"show node"*)',
    '"show node"*) touch "$BAPO_LOGS/addresses"; until [[ -e $BAPO_LOGS/goes-on ]]; do sleep 0.05; done;',
)
"""Gives no address of a node before the test says so."""


def job(
    folder: Path,
    *,
    is_saved: bool,
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
        "BAPO_LAUNCH": str(LAUNCH),
        "BAPO_LOGS": str(logs),
        "BAPO_PYTHON": str(python),
        "BAPO_SIGNAL_S": "2",
        **dict.fromkeys(
            ("RAY_AUTH_TOKEN", "SLURM_JWT", "RAY_REDIS_PASSWORD", "WANDB_API_KEY", "OPENAI_LOGIN"), "s3cret"
        ),
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NODELIST": "node-1",
        "SLURM_JOB_NUM_NODES": "1",
        **more,
    }
    script = ["bash", "-c", "umask 027; exec bash $0 config.yaml", LAUNCH / "slurm.sbatch"]
    return running(script, environment)


def asked_of_slurm(folder: Path) -> str:
    asked = folder / "run" / "slurm" / "asked"
    return asked.read_text() if asked.exists() else ""


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_job_out_of_time_gives_its_step_up_and_is_requeued_and_logs_no_secret(is_saved: bool, tmp_path: Path) -> None:
    logs = tmp_path / "run" / "slurm"
    with job(tmp_path, is_saved=is_saved) as started:
        wait_for(logs / "runs")
        start_s = time.monotonic()
        started.send_signal(signal.SIGUSR1)
        code = started.wait(timeout=LIMIT_S)
    assert time.monotonic() - start_s >= 1.0, "the step under way got its time"
    assert code == 131
    found = (logs / "7-environment.txt").read_text()
    assert "SLURM_JOB_NUM_NODES=1" in found
    assert "s3cret" not in found
    assert asked_of_slurm(tmp_path) == "requeue 7\n"


@pytest.mark.parametrize(
    ("counted", "asked"),
    [("3 step-00000004", "requeue 7\n"), ("4 step-00000004", ""), ("4 step-00000002", "requeue 7\n")],
)
def test_a_job_is_not_requeued_after_five_starts_in_a_row_without_a_new_checkpoint(
    counted: str, asked: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    count = tmp_path / "run" / "slurm" / ".progress-7"
    with job(tmp_path, is_saved=True) as started:
        count.write_text(f"{counted}\n")
        wait_for(tmp_path / "run" / "slurm" / "runs")
        started.send_signal(signal.SIGUSR1)
        _, errors = started.communicate(timeout=LIMIT_S)
    assert asked_of_slurm(tmp_path) == asked
    repeated = "the step under way is not saved and will be repeated from step-00000004; job 7 is requeued"
    assert (repeated in capfd.readouterr().out) == bool(asked)
    assert ("the newest checkpoint is still step-00000004 after 5 starts" in errors) == (not asked)
    assert count.exists() == bool(asked)


def test_a_job_is_requeued_once_slurms_controller_replies(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    refusing = SCONTROL.replace(
        "    *)",
        '    requeue*) mkdir "$BAPO_LOGS/refused" 2>/dev/null && exit 1; echo "$*" >>"$BAPO_LOGS/asked" ;;\n    *)',
    )
    with job(tmp_path, is_saved=True, scontrol=refusing) as started:
        wait_for(tmp_path / "run" / "slurm" / "runs")
        started.send_signal(signal.SIGUSR1)
        started.wait(timeout=LIMIT_S)
    assert (tmp_path / "run" / "slurm" / "refused").exists()
    assert asked_of_slurm(tmp_path) == "requeue 7\n"
    assert "job 7 is requeued" in capfd.readouterr().out


def test_a_job_that_is_preempted_again_and_again_is_requeued_each_time(tmp_path: Path) -> None:
    with job(tmp_path, is_saved=True, scontrol=PREEMPTED_SCONTROL) as started:
        (tmp_path / "run" / "slurm" / ".progress-7").write_text("9 step-00000004\n")
        wait_for(tmp_path / "run" / "slurm" / "runs")
        started.send_signal(signal.SIGUSR1)
        started.wait(timeout=LIMIT_S)
    assert asked_of_slurm(tmp_path) == "requeue 7\n"


def test_the_tasks_of_a_job_may_use_all_cores_and_its_head_has_no_ephemeral_port(tmp_path: Path) -> None:
    """By default Linux gives the ports from 32768 on to outgoing connections."""
    with job(tmp_path, is_saved=False, srun="#!/usr/bin/env bash\n", job_id=12001) as started:
        assert started.wait(timeout=LIMIT_S) == 0
    found = (tmp_path / "run" / "slurm" / "12001-environment.txt").read_text()
    assert "SLURM_CPU_BIND=none" in found
    assert "RAY_ADDRESS=127.0.0.1:20001" in found


def test_all_that_the_launcher_prints_is_in_the_log_when_its_job_has_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    srun = "#!/usr/bin/env bash\n[[ $* == *ray_node.sh ]] || { seq 20000; echo 'no such\\n file' >&2; printf end; }\n"
    with job(tmp_path, is_saved=False, srun=srun) as started:
        assert started.wait(timeout=LIMIT_S) == 0
    assert capfd.readouterr().out.splitlines() == [*map(str, range(1, 20001)), "no such\\n file", "end"]


def test_the_environment_of_a_job_lists_every_node_and_no_credentials_of_checkouts_and_indexes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    freeze = """#!/usr/bin/env bash
    echo '-e git+https://user:s3cret@s3cret@git.example.com/team/code.git@abc#egg=code'
    echo 'extra @ https://s3cret@index.example.com/extra-1.0.tar.gz'
    echo 'local @ git+ssh://git@git.example.com/team/local.git@abc'
    """
    two_nodes = SCONTROL.replace("(node-1)", "(node-1 node-2)").replace("127.0.0.1", "192.0.2.7")
    two_nodes = two_nodes.replace('"show node"*)', '"show node"*) echo asked >>"$BAPO_LOGS/addresses";')
    python = executable(tmp_path / "freeze", freeze)
    with job(tmp_path, is_saved=False, srun="#!/usr/bin/env bash\n", scontrol=two_nodes, python=python) as started:
        _, errors = started.communicate(timeout=LIMIT_S)
        assert started.returncode == 0
    assert "example.com" not in capfd.readouterr().out + errors, "the log, which `logs` shows, lists no packages"
    found = (tmp_path / "run" / "slurm" / "7-environment.txt").read_text()
    assert "BAPO_NODE_ADDRESSES=node-1 192.0.2.7\nnode-2 192.0.2.7\n" in found
    assert (tmp_path / "run" / "slurm" / "addresses").read_text() == "asked\n", "once for all nodes"
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


@pytest.mark.parametrize("code", [1, 130, 143])
def test_a_job_that_is_preempted_without_a_signal_to_its_script_is_requeued_however_its_launcher_ends(
    code: int, tmp_path: Path
) -> None:
    srun = f"#!/usr/bin/env bash\nexit {code}\n"
    with job(tmp_path, is_saved=True, srun=srun, scontrol=PREEMPTED_SCONTROL) as started:
        started.wait(timeout=LIMIT_S)
    assert asked_of_slurm(tmp_path) == "requeue 7\n"


@pytest.mark.parametrize(("code", "scontrol"), [(0, PREEMPTED_SCONTROL), (1, SCONTROL)], ids=["finished", "failed"])
def test_a_run_that_finishes_while_it_is_preempted_and_one_that_fails_end_their_job(
    code: int, scontrol: str, tmp_path: Path
) -> None:
    with job(tmp_path, is_saved=True, srun=f"#!/usr/bin/env bash\nexit {code}\n", scontrol=scontrol) as started:
        assert started.wait(timeout=LIMIT_S) == code
    assert asked_of_slurm(tmp_path) == ""


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
        (tmp_path / "run" / "slurm" / "goes-on").touch()
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
    scontrol = SCONTROL.replace("(node-1)", f"({names})").replace("127.0.0.1", address)
    with job(tmp_path, is_saved=False, scontrol=scontrol) as started:
        assert started.wait(timeout=LIMIT_S) == 2
        assert started.stderr is not None
        assert expected in started.stderr.read()
    assert not (tmp_path / "run" / "slurm" / ".token-7").exists()


def test_the_first_node_of_a_job_is_its_head_whichever_node_names_the_address_of_its_interface_first(
    tmp_path: Path,
) -> None:
    srun = "#!/usr/bin/env bash\n[[ $* != *ip\\ -4* ]] || printf 'node-2 192.0.2.8\\nnode-1 192.0.2.7\\n'\n"
    scontrol = SCONTROL.replace("(node-1)", "(node-1 node-2)")
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


def test_a_job_names_a_node_whose_ray_has_failed_although_its_step_goes_on(tmp_path: Path) -> None:
    srun = SRUN.replace("trap 'exit 0' USR2; while", 'trap "exit 0" USR2; echo node-7 >>"$BAPO_FAILED_NODES"; while')
    with job(tmp_path, is_saved=True, srun=srun) as started:
        wait_for(tmp_path / "run" / "slurm" / "runs")
        assert started.stderr is not None
        assert "Ray has ended on node-7 before the run" in started.stderr.readline()
        started.send_signal(signal.SIGUSR1)
        started.wait(timeout=LIMIT_S)
    assert not (tmp_path / "run" / "slurm" / ".failed-nodes-7").exists()


def test_a_node_whose_ray_does_not_start_is_noted(tmp_path: Path) -> None:
    environment = {
        "PATH": os.environ["PATH"],
        "BAPO_FAILED_NODES": str(tmp_path / "failed"),
        "SLURMD_NODENAME": "node-7",
    }
    refused = subprocess.run([LAUNCH / "ray_node.sh"], env=environment, capture_output=True, timeout=60)
    assert refused.returncode == 2
    assert (tmp_path / "failed").read_text() == "node-7\n"


def test_only_the_secret_of_a_job_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    with job(tmp_path, is_saved=True) as started:
        logs = tmp_path / "run" / "slurm"
        wait_for(logs / "runs")
        modes = {path.name: oct(path.stat().st_mode)[-3:] for path in logs.iterdir()}
        started.send_signal(signal.SIGUSR1)
        started.wait(timeout=LIMIT_S)
    assert modes == {".token-7": "600", "7-environment.txt": "640", "runs": "640"}


def test_a_cancelled_job_whose_time_limit_comes_in_a_long_step_has_failed_and_is_not_requeued(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with job(tmp_path, is_saved=True) as started:
        wait_for(tmp_path / "run" / "slurm" / "runs")
        started.send_signal(signal.SIGUSR2)
        wait_for(tmp_path / "run" / "slurm" / "asked-to-save")
        started.send_signal(signal.SIGUSR1)  # gives up the step after BAPO_SIGNAL_S / 2
        assert started.wait(timeout=LIMIT_S) == 131
    assert asked_of_slurm(tmp_path) == ""
    assert "the step under way is not saved and will be repeated from step-00000004" in capfd.readouterr().out
