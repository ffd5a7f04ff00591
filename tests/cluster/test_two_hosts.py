"""A run on two hosts, with and without Slurm: it completes, is preempted and continues, and ends if a host is lost.

The hosts are network namespaces with their own addresses. Each has a trainer rank and the second also the engine, so
weights are copied from both hosts' stores to the engine's store.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file

from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.planning.known_models import FOLDER as ARCHITECTURES
from tests.cluster.launched import (
    ENVIRONMENT,
    LAUNCH,
    START_LIMIT_S,
    train_steps,
    wait_for_step,
    write_config,
    write_token,
)
from tests.cluster.two_hosts import SlurmCluster, TwoHosts, named_as_on_debian, slurm_cluster
from tests.e2e.test_training import weight_stores as stores_of
from tests.processes import command_line, is_alive, title
from tests.tolerances import ENGINE_LOG_PROB

TWO_NODES = "{gpus_per_node: 0, gpu: null, num_nodes: 2, memory: '0', time_limit: '30', signal_s: 60}"
# The trainer on the first component of the job, the engine on the second.
HETEROGENEOUS = "{gpus_per_node: 0, gpu: null, num_nodes: 1, rollout_nodes: {gpus_per_node: 0}, time_limit: '30'}"
RECIPE = LAUNCH.parent / "configs" / "recipes" / "r1-distill-qwen-32b_64gpus.yaml"
PROMPTS = ("skywork_or1_math.parquet", "aime_2024.parquet")
RAYS_NOISE = ("RAY_BACKEND_LOG_LEVEL", "the actor restart will fail", "Failed to push error to driver")
BLIP_S = 7.0
# Ray closes a silent connection within 5 s (by default 30), so that the short network failure ends calls; it declares a
# host dead 12 s later.
SHORT_TIMEOUTS = {
    "RAY_grpc_keepalive_time_ms": "2000",
    "RAY_grpc_keepalive_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "12",
    "BAPO_HEAD_TIMEOUT_S": "12",
}
LOSS_LIMIT_S = 180
"""Limit from the loss of a host to the end of all processes on both hosts."""


def wait_until_gone(processes: dict[int, psutil.Process], limit_s: float = 15.0) -> None:
    _, alive = psutil.wait_procs(processes.values(), timeout=limit_s)
    assert [command_line(p) for p in alive if is_alive(p)] == []


def on_both(hosts: TwoHosts, besides: set[int] | frozenset[int] = frozenset()) -> dict[int, psutil.Process]:
    found = hosts.processes(0) | hosts.processes(1)
    return {pid: process for pid, process in found.items() if pid not in besides}


def weight_stores(hosts: TwoHosts) -> set[Path]:
    """Return the weight stores that processes on the hosts use."""
    return stores_of([*on_both(hosts).values()])


def test_a_run_survives_a_short_network_failure_restarts_after_a_killed_rank_and_ends_naming_a_lost_host(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, run_dir)
    nodes = torchrun_nodes(hosts, tmp_path, str(config))
    wait_for_step(run_dir, 2, tmp_path)
    check_only_ray_listens_on_all_interfaces(hosts)
    hosts.cut_cable()
    time.sleep(BLIP_S)
    before = max(train_steps(run_dir))
    hosts.mend_cable()
    wait_for_step(run_dir, before + 3, tmp_path)
    assert not (run_dir / "engine_events.jsonl").exists()
    stores = weight_stores(hosts)
    _kill_a_rank(hosts, run_dir, tmp_path)
    processes, stores = on_both(hosts), stores | weight_stores(hosts)
    assert stores
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
    assert not re.search(r"^\[\S+ \S+ E ", messages[0], re.MULTILINE), "error lines of Ray's library"
    assert [
        message
        for log in (*tmp_path.glob("node-*.log"), *(run_dir / "logs").glob("*.log"))
        for message in RAYS_NOISE
        if message in log.read_text()
    ] == []
    assert f"node {hosts.addresses[1]} has had no reply from the head {hosts.addresses[0]}" in messages[1]
    wait_until_gone(on_both(hosts))  # the scripts' last `sleep` may outlive them by two seconds
    assert [store for store in stores if store.exists()] == []
    _check_the_run_continues_to_its_end(hosts, run_dir, config)


def torchrun_nodes(hosts: TwoHosts, folder: Path, *arguments: str, **settings: str) -> list[subprocess.Popen]:
    """Start a run in `folder` with launch/torchrun_node.sh on both hosts; a secret is created there."""
    token, renamed, nodes = write_token(folder), named_as_on_debian(folder), []
    for rank, address in enumerate(hosts.addresses):
        environment = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "6391"}
        environment |= {"RAY_AUTH_TOKEN_PATH": str(token), "BAPO_NODE_ADDRESS": address}
        with (folder / f"node-{rank}.log").open("wb") as log:
            command = [*hosts.on(rank), *renamed, str(LAUNCH / "torchrun_node.sh"), *arguments]
            environment |= ENVIRONMENT | SHORT_TIMEOUTS | settings
            nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder))
    return nodes


def _check_the_run_continues_to_its_end(hosts: TwoHosts, run_dir: Path, config: Path) -> None:
    """The same command continues without a gap, and both nodes end with the run instead of after a timeout."""
    total_steps, folder = max(train_steps(run_dir)) + 1, run_dir.parent
    arguments = (str(config), f"trainer.total_steps={total_steps}")
    nodes = torchrun_nodes(hosts, folder, *arguments, BAPO_HEAD_TIMEOUT_S="3600")
    assert [node.wait(timeout=START_LIMIT_S) for node in nodes] == [0, 0], (folder / "node-0.log").read_text()
    assert "the run has ended with exit code 0" in (folder / "node-1.log").read_text()
    assert train_steps(run_dir) == list(range(1, total_steps + 1))
    wait_until_gone(on_both(hosts))
    check_weights_crossed(run_dir)


def check_only_ray_listens_on_all_interfaces(hosts: TwoHosts) -> None:
    """Ray's own servers ask for the token. Torch's store and everything else listens on the host's address."""
    by_command: dict[str, set[str]] = {}
    for host, address in enumerate(hosts.addresses):
        for line in _listening_sockets(hosts, host):
            listening = line.split()[3].rpartition(":")[0].replace(address, "own")
            with suppress(psutil.NoSuchProcess):
                command = " ".join(psutil.Process(int(line.split("pid=")[1].split(",")[0])).cmdline())
                by_command.setdefault(command, set()).add(listening)
    on_all = {command for command, listening in by_command.items() if listening & {"*", "0.0.0.0", "[::]"}}
    # The launcher and the main rank are Ray workers, too.
    workers = ("/gcs_server ", "/raylet ", "ray::", "-m megatron_bapo train ", "controller.trainer_rank ")
    assert [command for command in on_all if not any(worker in command for worker in workers)] == []
    assert not any("Dashboard" in command or "client.server" in command for command in by_command), by_command
    (store,) = {tuple(found) for command, found in by_command.items() if "cluster.rendezvous" in command}
    assert store == ("own",)


def _listening_sockets(hosts: TwoHosts, host: int) -> list[str]:
    """Return the lines of `ss`, which does not know the process of a socket that was opened while it looked."""
    deadline = time.monotonic() + LOSS_LIMIT_S
    while True:
        listed = subprocess.run([*hosts.on(host), "ss", "-ltnpH"], capture_output=True, text=True, check=True)
        if all("pid=" in line for line in listed.stdout.splitlines()):
            return listed.stdout.splitlines()
        assert time.monotonic() < deadline, listed.stdout
        time.sleep(0.5)


def _kill_a_rank(hosts: TwoHosts, run_dir: Path, logs: Path) -> None:
    """Kill the rank of the second host: all parts restart on both hosts, from the newest checkpoint."""
    before, restarts = on_both(hosts), run_dir / "restarts.jsonl"
    rank_module = "megatron_bapo.controller.trainer_rank"
    rank = next(each for each in hosts.processes(1).values() if rank_module in command_line(each)[:4])
    rank.kill()
    deadline = time.monotonic() + LOSS_LIMIT_S
    while not restarts.exists():
        assert time.monotonic() < deadline, (logs / "node-0.log").read_text()
        time.sleep(0.1)
    wait_for_step(run_dir, max(train_steps(run_dir)) + 1, logs)
    assert ["was killed by SIGKILL" in restart["reason"] for restart in read_rows(restarts)] == [True]
    # While a method runs, Ray adds its name to the process title.
    started = {title(process).split(".")[0] for pid, process in on_both(hosts).items() if pid not in before}
    assert started >= {"ray::NodeAgent", "ray::Engine", "ray::RolloutService"}


def check_weights_crossed(run_dir: Path) -> None:
    rows = [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl")]
    assert all(0 <= row["weight_sync/probe_diff_max"] < ENGINE_LOG_PROB for row in rows)
    assert all(row["weight_sync/relay_bytes"] > 0 for row in rows)


def bapo(cluster: SlurmCluster, *arguments: object, expected: int = 0) -> str:
    """Run the project's command on the first host; return its output."""
    done = subprocess.run(
        [*cluster.hosts.on(0), sys.executable, "-m", "megatron_bapo", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
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
        assert time.monotonic() < deadline, f"job {job} is {found}, not {state}\n{logs}"
        time.sleep(0.5)


def test_a_slurm_job_continues_after_preemption_fails_with_a_lost_node_and_a_heterogeneous_job_finishes_the_run(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, run_dir)
    two_nodes, heterogeneous = tmp_path / "two_nodes.yaml", tmp_path / "heterogeneous.yaml"
    two_nodes.write_text(TWO_NODES)
    heterogeneous.write_text(HETEROGENEOUS)
    with slurm_cluster(hosts, tmp_path / "slurm") as cluster:
        daemons = set(on_both(hosts))
        assert "sbatch --parsable" in bapo(cluster, "submit", config, "--cluster", two_nodes, "--dry-run")
        assert not run_dir.exists()
        job = submitted(cluster, config, "--cluster", two_nodes)
        _check_a_32b_run_is_queued(cluster)
        stores = _check_preemption(cluster, run_dir, job)
        _check_a_lost_node(cluster, run_dir, job)
        total_steps = max(train_steps(run_dir)) + 3
        job = submitted(cluster, config, "--cluster", heterogeneous, f"trainer.total_steps={total_steps}")
        wait_for_state(cluster, job, "COMPLETED", START_LIMIT_S)
        assert "state        COMPLETED" in bapo(cluster, "status", job)
        assert train_steps(run_dir) == list(range(1, total_steps + 1))
        wait_until_gone(on_both(hosts, besides=daemons | set(hosts_daemons(cluster))))
    assert "2 trainer ranks; " in (run_dir / "slurm" / f"{job}.log").read_text()
    environment = (run_dir / "slurm" / f"{job}-environment.txt").read_text()
    assert "SLURM_HET_SIZE=2" in environment
    assert "TOKEN" not in environment
    assert not list((run_dir / "slurm").glob(".token-*"))
    check_weights_crossed(run_dir)
    assert [store for store in stores if store.exists()] == []


def hosts_daemons(cluster: SlurmCluster) -> list[int]:
    return [daemon.pid for daemon in cluster.daemons.values()]


def submitted(cluster: SlurmCluster, config: Path, *arguments: object) -> str:
    return bapo(cluster, "submit", config, *arguments).split("job ")[-1].split(";")[0]


def write_tokenizer(model: Path) -> None:
    """Write a tokenizer with a chat template, and an empty weight file, to a model's folder."""
    tokenizer = byte_tokenizer(["a", "b"])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(model)
    save_file({}, model / "model.safetensors")


def write_inputs(model: Path, data: Path) -> None:
    """Write what is checked before a run is queued: a tokenizer, an empty weight file and prompts."""
    write_tokenizer(model)
    data.mkdir()
    for index, name in enumerate(PROMPTS):
        texts = [f"What is {number}?" for number in range(index, 2000, 2)]
        pq.write_table(pa.table({"prompt": texts, "answer": ["1"] * len(texts)}), data / name)


def _check_a_32b_run_is_queued(cluster: SlurmCluster) -> None:
    """Submit a recipe to a cluster whose GPU nodes are down: it is refused without its files, and then queued."""
    cluster.environment["SBATCH_PARTITION"] = "gpu"
    refused = bapo(cluster, "submit", RECIPE, "--cluster", "h100", expected=2)
    model, data = cluster.folder / "models" / "DeepSeek-R1-Distill-Qwen-32B", cluster.folder / "data"
    assert f"model.path=models/{model.name} must be an existing folder" in refused
    shutil.copytree(ARCHITECTURES / model.name, model)
    write_inputs(model, data)
    job = submitted(cluster, RECIPE, "--cluster", "h100")
    assert bapo_status(cluster, job)["state"] == "PENDING"
    assert "NumNodes=8" in cluster.call("scontrol", "show", "job", job)
    bapo(cluster, "cancel", job, "--now")
    del cluster.environment["SBATCH_PARTITION"]


def _check_preemption(cluster: SlurmCluster, run_dir: Path, job: str) -> set[Path]:
    """The job saves its state when it is preempted, is queued again, and continues; returns its weight stores."""
    wait_for_step(run_dir, 1, run_dir)
    stores = weight_stores(cluster.hosts)
    assert stores
    _check_processes_may_use_all_cores(cluster.hosts)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    wait_for_state(cluster, job, "PENDING", LOSS_LIMIT_S)
    assert bapo_status(cluster, job)["Restarts"] == "1"
    saved = json.loads(max((run_dir / "checkpoints").glob("step-*")).joinpath("state.json").read_text())["step"]
    assert saved == max(train_steps(run_dir))
    assert "the state is saved" in (run_dir / "slurm" / f"{job}.log").read_text()
    # Slurm would wait two minutes; in the second in which the job was removed from a node, the node refuses it.
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+4")
    wait_for_step(run_dir, saved + 1, run_dir)
    assert train_steps(run_dir)[: saved + 1] == list(range(1, saved + 2))
    return stores | weight_stores(cluster.hosts)


def _check_processes_may_use_all_cores(hosts: TwoHosts) -> None:
    """By default Slurm binds each task to its share of the cores, here one."""
    workers, cores = ("ray::", "megatron_bapo.controller.trainer_rank"), []
    for process in on_both(hosts).values():
        with suppress(psutil.NoSuchProcess):  # the scripts' `sleep` ends at any time
            if any(worker in " ".join(command_line(process)) for worker in workers):
                cores.append(tuple(process.cpu_affinity()))
    assert len(cores) >= 2
    assert {*cores} == {tuple(sorted(os.sched_getaffinity(0)))}


def _check_a_lost_node(cluster: SlurmCluster, run_dir: Path, job: str) -> None:
    """Kill slurmd and all processes of the second node: the job's log names the node, and the node comes back."""
    for process in cluster.hosts.processes(1).values():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    log, message = run_dir / "slurm" / f"{job}.log", f"node {cluster.hosts.addresses[1]} is lost"
    deadline = time.monotonic() + LOSS_LIMIT_S
    while message not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)
    cluster.start_node(1)  # Slurm waits for the node before it ends the job
    wait_for_state(cluster, job, "FAILED", 2 * LOSS_LIMIT_S)
    logs = bapo(cluster, "logs", job, "--lines", 100)
    assert message in logs
    assert not re.search(r"^\S+==\d", logs, re.MULTILINE), "the package list"
    cluster.wait_for("2 idle", "sinfo", "--noheader", "--partition=all", "--format=%D %t")
