"""Slurm jobs that are cancelled, terminated, preempted while starting, misconfigured or in containers, or whose Ray
head dies."""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.launched import LAUNCH, START_LIMIT_S, train_steps, wait_for_step, write_config
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
from tests.e2e.small_disk import fill, free, small_disk
from tests.processes import title
from tests.unit.launch.stubbed import executable

pytestmark = pytest.mark.cluster_full

APPTAINER = """#!/usr/bin/env bash
# Runs a command as `apptainer exec OPTIONS IMAGE COMMAND` does: in the folder {hidden} it sees only what --bind names.
set -e
shift
while [[ $1 == --* ]]; do
    case $1 in --bind=*) binds=${{1#*=}} ;; --pwd=*) folder=${{1#*=}} ;; esac
    shift
done
shift
exec unshare --mount bash -c '
    IFS=, read -ra binds <<<"$1"
    for number in "${{!binds[@]}}"; do eval "exec $((number + 20))<\\"${{binds[number]%%:*}}\\""; done
    mount -t tmpfs -o mode=755 none {hidden}
    for number in "${{!binds[@]}}"; do
        mkdir -p "${{binds[number]#*:}}"
        mount --no-canonicalize --bind "/proc/self/fd/$((number + 20))" "${{binds[number]#*:}}"
    done
    ls {hidden} >"$2/seen"
    cd "$2"
    shift 2
    exec "$@"
' container "$binds" "$folder" "$@"
"""

LAUNCHER = """#!/usr/bin/env bash
# Instead of Python: Ray on a node, and a launcher that prints line after line until it is asked to save.
if [[ $* == *ray_start* ]]; then exec sleep 1000; fi
[[ $* == *\\ train\\ * ]] || exit 0
trap 'echo saved; exit 130' USR1
for number in {{1..100000}}; do
    printf 'line %0300d\\n' "$number"
    echo "$number" >{folder}/number
    sleep 0.05
done
"""


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


def submitted_job(
    cluster: SlurmCluster, folder: Path, *overrides: str, run_dir: Path | None = None, **settings: str
) -> str:
    """Submit the run in `run_dir`, by default `folder`/run, to a cluster of two nodes with these settings."""
    nodes = folder / "nodes.yaml"
    nodes.write_text(
        TWO_NODES.removesuffix("}") + "".join(f", {key}: {value}" for key, value in settings.items()) + "}"
    )
    config = write_config(folder, run_dir or folder / "run")
    return submitted(cluster, config, "--cluster", nodes, *overrides)


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
    (head,) = [process for process in cluster.hosts.processes(0).values() if title(process) == "gcs_server"]
    head.kill()
    wait_for_state(cluster, job, "FAILED", START_LIMIT_S)
    assert bapo_status(cluster, job)["ExitCode"] == "1:0"
    assert "Ray has ended on n1 " in (run_dir / "slurm" / f"{job}.log").read_text()


def test_a_job_that_is_preempted_while_it_starts_begins_again_and_trains(cluster: SlurmCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = submitted_job(cluster, tmp_path)
    for restarts, moment in enumerate((f"slurm/{job}-environment.txt", "config.yaml"), start=1):
        wait_for_file(run_dir / moment)
        cluster.call("scancel", "--batch", "--signal=USR1", job)
        wait_for_state(cluster, job, "PENDING", START_LIMIT_S)
        assert bapo_status(cluster, job)["Restarts"] == str(restarts)
        cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+4")
    wait_for_step(run_dir, 1, run_dir)
    log = (run_dir / "slurm" / f"{job}.log").read_text()
    assert f"no checkpoint is complete, so the run will begin again; job {job} is requeued" in log
    assert "Traceback" not in log
    bapo(cluster, "cancel", job, "--now")
    wait_for_state(cluster, job, "CANCELLED", LOSS_LIMIT_S)


def test_a_job_that_is_preempted_by_slurms_defaults_is_requeued_and_continues(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """Slurm signals only the steps of the job, and with SIGTERM, which ends Ray."""
    run_dir = tmp_path / "run"
    job = submitted_job(cluster, tmp_path, "checkpoint.every_steps=1")
    wait_for_step(run_dir, 2, run_dir)
    options = ("--partition=urgent", "--nodes=2", "--output=/dev/null")
    urgent = cluster.call("sbatch", "--parsable", *options, "--wrap=true").strip()
    wait_for_state(cluster, urgent, "COMPLETED", LOSS_LIMIT_S)
    assert (bapo_status(cluster, job)["JobState"], bapo_status(cluster, job)["Restarts"]) == ("PENDING", "1")
    before = max(train_steps(run_dir))
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+1")
    wait_for_step(run_dir, before + 1, run_dir)
    bapo(cluster, "cancel", job)
    check_saved(cluster, run_dir, job)


def test_the_log_of_a_job_goes_on_once_its_full_disk_has_space_again(hosts: TwoHosts, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    launcher = executable(tmp_path / "launcher", LAUNCHER.format(folder=tmp_path))
    (logs := tmp_path / "logs").mkdir()
    # Nodes see only what is mounted before they start.
    with small_disk(tmp_path / "disk", mib=1) as disk, slurm_cluster(hosts, tmp_path / "slurm") as cluster:
        cluster.environment |= {"BAPO_LAUNCH": str(LAUNCH), "BAPO_LOGS": str(logs), "BAPO_PYTHON": str(launcher)}
        log, script = disk / "job.log", str(LAUNCH / "slurm.sbatch")
        job = cluster.call("sbatch", "--parsable", f"--output={log}", "--signal=B:USR1@10", script, "none").strip()
        wait_for_file(tmp_path / "number")
        fill(disk)
        lost = wait_for_lines(tmp_path, 40)  # the first ones fit into the log's last page
        wait_for_lines(tmp_path, 10)
        free(disk)
        written = wait_for_lines(tmp_path, 20)
        cluster.call("scancel", "--batch", "--signal=USR2", job)
        wait_for_state(cluster, job, "FAILED", LOSS_LIMIT_S)  # there is no checkpoint
        lines = log.read_text().splitlines()
    assert f"line {lost:0300}" not in lines
    assert f"line {written - 5:0300}" in lines
    assert "saved" in lines


def wait_for_lines(folder: Path, num: int) -> int:
    """Wait until the launcher has printed `num` further lines; return the number of the last one."""
    end = last_number(folder) + num
    while (last := last_number(folder)) < end:
        time.sleep(0.1)
    return last


def last_number(folder: Path) -> int:
    return int((folder / "number").read_text() or 0)


def wait_for_file(file: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} does not exist"
        time.sleep(0.1)


def test_a_job_in_a_container_reads_its_token_and_writes_its_run_directory_outside_of_its_folder(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    run_dir = tmp_path / "elsewhere" / "run"
    (tmp_path / "unmounted").mkdir()
    (apptainer := cluster.folder / "apptainer").write_text(APPTAINER.format(hidden=tmp_path))
    apptainer.chmod(0o755)
    cluster.environment["PATH"] = f"{cluster.folder}:{os.environ['PATH']}"
    container = "{runtime: apptainer, image: bapo.sif}"
    job = submitted_job(cluster, cluster.folder, "trainer.total_steps=2", run_dir=run_dir, container=container)
    wait_for_state(cluster, job, "COMPLETED", START_LIMIT_S)
    assert (cluster.folder / "seen").read_text().split() == ["elsewhere", "slurm"]
    assert train_steps(run_dir) == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "slurm", "unmounted"]
