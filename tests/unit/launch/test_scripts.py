"""The scripts of launch/ and tools/ by shellcheck, and what they refuse before they start anything."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.s*"), *(ROOT / "tools").glob("*.sh")])
RAY_NODE = ROOT / "launch" / "ray_node.sh"
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
        ({}, "RAY_AUTH_TOKEN_PATH must name a file with the cluster's secret"),
        ({"RAY_AUTH_TOKEN_PATH": "open"}, "open is open to others: chmod 600 it"),
    ],
    ids=str,
)
def test_ray_is_not_started_without_an_address_and_a_protected_secret(
    environment: dict[str, str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "open").write_text("secret")
    (tmp_path / "open").chmod(0o644)
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
    assert "secret" not in done.stderr.replace("cluster's secret", "")


def test_the_kuberay_job_has_token_authentication_and_as_many_nodes_as_it_waits_for() -> None:
    job = yaml.safe_load((ROOT / "launch" / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    num_nodes = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    *_, config, option, waited_for = job["spec"]["entrypoint"].split()
    assert (option, int(waited_for)) == ("--num-nodes", num_nodes)
    assert (ROOT / config).is_file()
    versions = (ROOT / "requirements.txt").read_text()
    assert f"ray[default]=={cluster['rayVersion']}" in versions or f"ray=={cluster['rayVersion']}" in versions


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_job_out_of_time_queues_again_if_there_is_a_checkpoint_and_writes_down_no_secret(
    is_saved: bool, tmp_path: Path
) -> None:
    logs = tmp_path / "run" / "slurm"
    logs.mkdir(parents=True)
    if is_saved:
        (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "BAPO_LAUNCH": str(ROOT / "launch"),
        "BAPO_LOGS": str(logs),
        "BAPO_PYTHON": "true",
        "BAPO_SIGNAL_S": "2",
        **dict.fromkeys(("RAY_AUTH_TOKEN", "SLURM_JWT", "WANDB_API_KEY", "OPENAI_LOGIN"), "s3cret"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-1",
        "SLURM_JOB_NUM_NODES": "1",
    }
    with subprocess.Popen(["bash", ROOT / "launch" / "slurm.sbatch", "config.yaml"], env=environment) as job:
        deadline = time.monotonic() + 20
        while not (logs / "runs").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        start_s = time.monotonic()
        job.send_signal(signal.SIGUSR1)
        code = job.wait(timeout=20)
    assert time.monotonic() - start_s >= 1.0, "the step under way got its time"
    assert code == 130
    found = (logs / "7-environment.txt").read_text()
    assert "SLURM_JOB_NUM_NODES=1" in found
    assert "s3cret" not in found
    asked = (logs / "asked").read_text() if (logs / "asked").exists() else ""
    assert asked == ("requeue 7\n" if is_saved else "")
