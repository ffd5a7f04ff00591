"""A run over two hosts, with and without Slurm: it completes, is preempted and continues, and survives no lost host.

The hosts are network namespaces with addresses of their own; each has a trainer rank, the second one the engine, so
weights go from both hosts' stores to that of the engine's.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.weight_sync.transport import PREFIX, SHARED_MEMORY
from tests.cluster.two_hosts import SlurmCluster, TwoHosts, slurm_cluster
from tests.e2e.test_training import CONFIG as SMALLEST
from tests.tolerances import ENGINE_LOG_PROB

# Nulls take back what the smallest run of tests/e2e has.
CONFIG = """
extends: smallest.yaml
data: {validation: null}
warm_start: null
trainer: {total_steps: 100000, train_batch_size: 16, ppo_mini_batch_size: 8}
checkpoint: {every_steps: 5}
weight_sync: {full_every: 2}
logging: {dump_rollouts: null}
"""
CLUSTER = "{gpus_per_node: 0, gpu: null, num_nodes: 2, time_limit: '30', signal_s: 60}"
LAUNCH = Path(__file__).parents[2] / "launch"
START_LIMIT_S = 240
LOSS_LIMIT_S = 60
"""From the loss of a host to the end of everything on both."""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(LAUNCH.parent),
    "BAPO_PYTHON": sys.executable,
    "BAPO_OBJECT_STORE_BYTES": str(100 << 20),
    "BAPO_HEAD_TIMEOUT_S": "6",
    # Ray would take a minute to give up a silent host.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}


def write_config(folder: Path, run_dir: Path) -> Path:
    (folder / "smallest.yaml").write_text(SMALLEST.format(run_dir=run_dir))
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    return config


def train_steps(run_dir: Path) -> list[int]:
    metrics = run_dir / "metrics.jsonl"
    return [row["step"] for row in read_rows(metrics)] if metrics.exists() else []


def wait_for_step(run_dir: Path, step: int, logs: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while step not in train_steps(run_dir):
        shown = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in logs.rglob("*.log"))
        assert time.monotonic() < deadline, f"step {step} did not come\n{shown}"
        time.sleep(0.2)


def wait_until_gone(processes: dict[int, psutil.Process], limit_s: float = 15.0) -> None:
    _, alive = psutil.wait_procs(processes.values(), timeout=limit_s)
    assert [p.cmdline() for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def on_both(hosts: TwoHosts, besides: set[int] = frozenset()) -> dict[int, psutil.Process]:
    pids = {pid for host in (0, 1) for pid in hosts.processes(host)} - besides
    return {pid: psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)}


def weight_stores() -> set[Path]:
    return set(SHARED_MEMORY.glob(f"{PREFIX}*"))


def test_a_cut_cable_ends_the_run_on_both_hosts_with_the_name_of_the_lost_one(hosts: TwoHosts, tmp_path: Path) -> None:
    run_dir, token, stores_before = tmp_path / "run", tmp_path / "token", weight_stores()
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    config = write_config(tmp_path, run_dir)
    nodes = []
    for rank, address in enumerate(hosts.addresses):
        environment = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "6391"}
        environment |= {"RAY_AUTH_TOKEN_PATH": str(token), "BAPO_NODE_ADDRESS": address}
        with (tmp_path / f"node-{rank}.log").open("wb") as log:
            command = [*hosts.on(rank), str(LAUNCH / "torchrun_node.sh"), str(config)]
            nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT | environment, cwd=tmp_path))
    wait_for_step(run_dir, 2, tmp_path)
    processes = on_both(hosts)
    hosts.cut_cable()
    start_s = time.monotonic()
    try:
        assert [node.wait(timeout=LOSS_LIMIT_S) for node in nodes] == [1, 1]
        wait_until_gone(processes)
        assert time.monotonic() - start_s < LOSS_LIMIT_S
    finally:
        hosts.mend_cable()
    messages = [(tmp_path / f"node-{rank}.log").read_text() for rank in (0, 1)]
    assert f"node {hosts.addresses[1]} is lost" in messages[0]
    assert "Traceback" not in messages[0]
    assert f"node {hosts.addresses[1]} has had no answer from the head {hosts.addresses[0]}" in messages[1]
    assert on_both(hosts) == {}
    assert weight_stores() <= stores_before
    check_weights_crossed(run_dir)


def check_weights_crossed(run_dir: Path) -> None:
    rows = [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl")]
    assert all(0 <= row["weight_sync/probe_diff_max"] < ENGINE_LOG_PROB for row in rows)
    assert all(row["weight_sync/relay_bytes"] > 0 for row in rows)


def bapo(cluster: SlurmCluster, *arguments: object, expected: int = 0) -> str:
    """What the project's command prints on the first host."""
    done = subprocess.run(
        [*cluster.hosts.on(0), sys.executable, "-m", "megatron_bapo", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=cluster.folder,
        env={**ENVIRONMENT, **cluster.environment, "COLUMNS": "200"},
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


def state_of(cluster: SlurmCluster, job: str) -> str:
    return bapo_status(cluster, job).get("state", "")


def bapo_status(cluster: SlurmCluster, job: str) -> dict[str, str]:
    described = cluster.call("scontrol", "show", "job", job, "--oneliner")
    return dict(field.split("=", 1) for field in described.split() if "=" in field) | {
        "state": described.split("JobState=")[1].split()[0]
    }


def wait_for_state(cluster: SlurmCluster, job: str, state: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while (found := state_of(cluster, job)) != state:
        logs = "\n".join(path.read_text()[-3000:] for path in cluster.folder.rglob(f"{job}*.log"))
        assert time.monotonic() < deadline, f"job {job} is {found}, and not {state}\n{logs}"
        time.sleep(0.5)


def test_a_slurm_job_ends_with_its_node_and_is_preempted_and_continues_to_its_last_step(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, run_dir)
    (tmp_path / "two_nodes.yaml").write_text(CLUSTER)
    target = ("--cluster", tmp_path / "two_nodes.yaml")
    stores_before = weight_stores()
    with slurm_cluster(hosts, tmp_path / "slurm") as cluster:
        daemons = set(on_both(hosts))
        refused = bapo(cluster, "submit", config, "rollout.n=3", *target, expected=2)
        assert "must be a multiple of rollout.n=3" in refused
        assert "sbatch --parsable" in bapo(cluster, "submit", config, *target, "--dry-run")
        assert not run_dir.exists()
        _check_a_lost_node(cluster, run_dir, config, target)
        _check_preemption(cluster, run_dir, config, target)
        wait_until_gone(on_both(hosts, besides=daemons | set(hosts_daemons(cluster))))
    check_weights_crossed(run_dir)
    assert weight_stores() <= stores_before


def hosts_daemons(cluster: SlurmCluster) -> list[int]:
    return [daemon.pid for daemon in cluster.daemons.values()]


def submitted(cluster: SlurmCluster, config: Path, *arguments: object) -> str:
    return bapo(cluster, "submit", config, *arguments).split("job ")[-1].split(";")[0]


def _check_a_lost_node(cluster: SlurmCluster, run_dir: Path, config: Path, target: tuple) -> None:
    """Slurmd of the second node and all that runs there are killed: the job says so, and the node comes back."""
    job = submitted(cluster, config, *target)
    wait_for_step(run_dir, 6, run_dir)  # one behind a checkpoint
    for pid in cluster.hosts.processes(1):
        os.kill(pid, signal.SIGKILL)
    log, message = run_dir / "slurm" / f"{job}.log", f"node {cluster.hosts.addresses[1]} is lost"
    deadline = time.monotonic() + LOSS_LIMIT_S
    while message not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
    cluster.start_node(1)  # Slurm, too, waits for it
    wait_for_state(cluster, job, "FAILED", 2 * LOSS_LIMIT_S)
    assert message in bapo(cluster, "logs", job)
    cluster.wait_for("2 idle", "sinfo", "--noheader", "--format=%D %t")


def _check_preemption(cluster: SlurmCluster, run_dir: Path, config: Path, target: tuple) -> None:
    """The same run goes on, saves when it is preempted, queues again, and goes on to its last step."""
    before = max(train_steps(run_dir))
    total_steps = before + 25
    job = submitted(cluster, config, *target, f"trainer.total_steps={total_steps}")
    wait_for_step(run_dir, before + 1, run_dir)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    wait_for_state(cluster, job, "PENDING", LOSS_LIMIT_S)
    assert bapo_status(cluster, job)["Restarts"] == "1"
    saved = json.loads(max((run_dir / "checkpoints").glob("step-*")).joinpath("state.json").read_text())["step"]
    assert total_steps > saved == max(train_steps(run_dir)) > before
    assert "the state is saved" in (run_dir / "slurm" / f"{job}.log").read_text()
    # Slurm would wait two minutes; within the second in which the job was taken off a node, the node refuses it.
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+4")
    wait_for_state(cluster, job, "COMPLETED", START_LIMIT_S)
    assert train_steps(run_dir) == list(range(1, total_steps + 1))
    assert "state        COMPLETED" in bapo(cluster, "status", job)
    environment = (run_dir / "slurm" / f"{job}-environment.txt").read_text()
    assert "SLURM_JOB_NUM_NODES=2" in environment
    assert "TOKEN" not in environment
    assert not list((run_dir / "slurm").glob(".token-*"))
