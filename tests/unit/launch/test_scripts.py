"""Tests of the scripts in launch/ and tools/, and of the KubeRay job: shellcheck, refused input and settings."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.unit.launch.stubbed import LAUNCH, executable, write_token

ROOT = LAUNCH.parent
SCRIPTS = sorted([*LAUNCH.glob("*.s*"), *(ROOT / "tools").glob("*.sh")])
RAY_NODE = LAUNCH / "ray_node.sh"
pytestmark = pytest.mark.slow


def test_shellcheck_finds_nothing() -> None:
    assert len(SCRIPTS) >= 6
    checker = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([checker, *SCRIPTS], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_there_are_no_hyperparameters_in_scripts() -> None:
    for script in SCRIPTS:
        text = script.read_text()
        assert not [key for key in ("batch_size", "world_size=", "lr=", "total_steps", "rollout.") if key in text]


@pytest.mark.parametrize(("limit", "expected"), [("-Sn 256", "4096"), ("-Sn 4096", "4096")])
def test_scripts_raise_the_limit_of_open_files_that_they_inherit(limit: str, expected: str) -> None:
    shell = f"ulimit {limit}; ulimit -Hn 4096; source {LAUNCH}/shared.sh; ulimit -Sn"
    found = subprocess.run(["bash", "-euc", shell], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (0, f"{expected}\n"), found.stderr


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


def test_the_kuberay_job_is_valid_by_kuberays_own_schema() -> None:
    definition = yaml.safe_load(Path(__file__).with_name("rayjob.schema.yaml").read_text())
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    check = Draft202012Validator(definition).iter_errors
    assert [error.message for error in check(job)] == []
    job["spec"]["rayClusterSpec"]["authOption"] = job["spec"]["rayClusterSpec"].pop("authOptions")
    assert ["'authOption' was unexpected" in error.message for error in check(job)] == [True]


def test_rays_servers_have_the_launchers_settings_on_kubernetes() -> None:
    """There `ray start` runs without cluster/ray_start.py."""
    code = (ROOT / "megatron_bapo" / "ray_variables.py").read_text()
    found = dict(re.findall(r'"(RAY_[a-z]\w+)": "(\d+)"', code))
    assert "RAY_prestart_worker_first_driver" in found
    del found["RAY_enable_metrics_collection"]  # KubeRay has metrics of its own
    container = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    pod = container["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {each["name"]: each["value"] for each in pod["env"] if each["name"][4].islower()} == found


def test_the_kuberay_job_has_token_authentication_and_the_number_of_nodes_it_waits_for() -> None:
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    num_nodes = 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"])
    command = shlex.split(job["spec"]["entrypoint"])[-1].partition("||")[0]
    *_, config, option, waited_for = command.split()
    assert (option, int(waited_for)) == ("--num-nodes", num_nodes)
    assert (ROOT / config.removeprefix("/opt/megatron-bapo/")).is_file()
    assert "WORKDIR /opt/megatron-bapo" in (ROOT / "Dockerfile").read_text()
    versions = (ROOT / "requirements.txt").read_text()
    assert f"ray[default]=={cluster['rayVersion']}" in versions or f"ray=={cluster['rayVersion']}" in versions


def test_pods_of_the_kuberay_job_have_time_to_save_before_they_are_killed() -> None:
    cluster = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert [pod["terminationGracePeriodSeconds"] for pod in pods] == [600, 600]
    limits = ("RAY_JOB_STOP_WAIT_TIME_S", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    for pod in pods:
        variables = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        assert [variables[name] for name in limits] == ["570", "570"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (130, 0), (1, 1), (131, 131)])
def test_the_kuberay_job_succeeds_if_the_run_was_asked_to_stop(code: int, expected: int, tmp_path: Path) -> None:
    """KubeRay's shell reads the entrypoint, then `ray job submit` quotes its words for the shell that runs them."""
    executable(tmp_path / "ray", f"#!{sys.executable}\nimport shlex, sys\nprint(shlex.join(sys.argv[4:]))\n")
    executable(tmp_path / "python", f"#!/bin/sh\n[ $2 = megatron_bapo ] && exit {code}\n")
    entrypoint = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]["entrypoint"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    submit = ["bash", "-c", f"ray job submit -- {entrypoint} ;"]
    submitted = subprocess.run(submit, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert subprocess.run(["sh", "-c", submitted.stdout], timeout=60, env=environment).returncode == expected


def test_pods_of_the_kuberay_job_may_lock_memory_for_rdma() -> None:
    cluster = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())["spec"]["rayClusterSpec"]
    containers = [
        container
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        for container in group["template"]["spec"]["containers"]
    ]
    added = [container["securityContext"]["capabilities"]["add"] for container in containers]
    assert added == [["IPC_LOCK"], ["IPC_LOCK"]]
