"""Slurm jobs that are cancelled, terminated or misconfigured, or whose Ray head dies."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.launched import START_LIMIT_S, train_steps, wait_for_step, write_config
from tests.cluster.test_two_hosts import (
    LOSS_LIMIT_S,
    TWO_NODES,
    bapo,
    bapo_status,
    hosts_daemons,
    on_both,
    submitted,
    wait_for_state,
    wait_until_gone,
)
from tests.cluster.two_hosts import SlurmCluster, TwoHosts, slurm_cluster

pytestmark = pytest.mark.cluster_full


@pytest.fixture
def cluster(hosts: TwoHosts, tmp_path: Path) -> Iterator[SlurmCluster]:
    tmp_path.chmod(0o755)
    temporary = Path(tempfile.mkdtemp(prefix="bapo-"))  # a short path, because Ray creates its sockets there
    with slurm_cluster(hosts, tmp_path / "slurm") as started:
        started.environment["TMPDIR"] = str(temporary)
        daemons = set(on_both(hosts))
        yield started
        wait_until_gone(on_both(hosts, besides=daemons | set(hosts_daemons(started))), LOSS_LIMIT_S)
    assert [path.name for path in temporary.iterdir()] == []
    temporary.rmdir()


def submitted_job(cluster: SlurmCluster, folder: Path, **settings: str) -> str:
    """Submit the run in `folder`/run to a cluster of two nodes with these settings."""
    nodes = folder / "nodes.yaml"
    nodes.write_text(
        TWO_NODES.removesuffix("}") + "".join(f", {key}: {value}" for key, value in settings.items()) + "}"
    )
    return submitted(cluster, write_config(folder, folder / "run"), "--cluster", nodes)


def check_saved(cluster: SlurmCluster, run_dir: Path, job: str) -> None:
    """The job has succeeded, and its last step is saved."""
    wait_for_state(cluster, job, "COMPLETED", LOSS_LIMIT_S)
    assert bapo_status(cluster, job)["ExitCode"] == "0:0"
    saved = json.loads(max((run_dir / "checkpoints").glob("step-*")).joinpath("state.json").read_text())["step"]
    assert train_steps(run_dir) == list(range(1, saved + 1))
    assert "the state is saved" in (run_dir / "slurm" / f"{job}.log").read_text()


def test_a_cancelled_and_a_terminated_job_save_and_succeed_and_the_run_continues_without_a_gap(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = submitted_job(cluster, tmp_path)
    next_job = cluster.call("sbatch", "--parsable", f"--dependency=afterok:{job}", "--output=/dev/null", "--wrap=true")
    wait_for_step(run_dir, 2, run_dir)
    assert "saves its state after the current step and ends" in bapo(cluster, "cancel", job)
    check_saved(cluster, run_dir, job)
    wait_for_state(cluster, next_job.strip(), "COMPLETED", LOSS_LIMIT_S)
    modes = {path.suffix: oct(path.stat().st_mode)[-3:] for path in (run_dir / "slurm").iterdir()}
    assert modes == {".txt": "644", ".log": "644"}
    before = max(train_steps(run_dir))
    job = submitted_job(cluster, tmp_path)
    wait_for_step(run_dir, before + 1, run_dir)
    cluster.call("scancel", "--batch", "--signal=TERM", job)
    check_saved(cluster, run_dir, job)
    assert max(train_steps(run_dir)) > before


def test_a_job_on_an_unknown_interface_and_one_whose_head_dies_end_with_a_message(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    job = submitted_job(cluster, tmp_path, interface="ib7")
    wait_for_state(cluster, job, "FAILED", LOSS_LIMIT_S)
    assert bapo_status(cluster, job)["ExitCode"] == "2:0"
    assert "node n1 has no IPv4 address on the interface ib7" in bapo(cluster, "logs", job)
    run_dir = tmp_path / "run"
    job = submitted_job(cluster, tmp_path)
    wait_for_step(run_dir, 1, run_dir)
    (head,) = [pid for pid in cluster.hosts.processes(0) if psutil.Process(pid).name() == "gcs_server"]
    os.kill(head, signal.SIGKILL)
    wait_for_state(cluster, job, "FAILED", START_LIMIT_S)
    assert bapo_status(cluster, job)["ExitCode"] == "1:0"
    assert "Ray has ended before the run" in (run_dir / "slurm" / f"{job}.log").read_text()
