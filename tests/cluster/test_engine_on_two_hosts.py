"""A run whose only engine has one of its two tensor-parallel ranks on each of two hosts."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_bapo.errors import INTERRUPTED
from megatron_bapo.metrics.sinks import read_rows
from tests.cluster.launched import START_LIMIT_S, train_steps, wait_for_step, write_config
from tests.cluster.test_two_hosts import (
    check_only_ray_listens_on_all_interfaces,
    on_both,
    torchrun_nodes,
    wait_until_gone,
    weight_stores,
)
from tests.cluster.two_hosts import TwoHosts
from tests.processes import title
from tests.tolerances import ENGINE_LOG_PROB

pytestmark = pytest.mark.cluster_full

ENGINE = ("rollout.tensor_parallel_size=2", "rollout.nodes_per_engine=2", "rollout.kv_cache_gib=0.02")
SETTINGS = (*ENGINE, "rollout.health_check_interval_s=1", "trainer.max_restarts=0")


def is_rank(process: psutil.Process) -> bool:
    return "Worker_TP" in title(process)


def is_follower(process: psutil.Process) -> bool:
    return title(process).startswith("ray::EngineFol")  # the kernel keeps 15 characters


FAULTS = ((0, is_rank), (1, is_rank), (0, is_follower))
"""Host and process of each fault; vLLM's core is on the second host."""


def matching(hosts: TwoHosts, host: int, matches: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Return a host's processes that match; others may end meanwhile."""
    return [process for process in hosts.processes(host).values() if matches(process)]


def engine_events(run_dir: Path) -> list[str]:
    """Return the events of engines so far."""
    file = run_dir / "engine_events.jsonl"
    return [row["event"] for row in read_rows(file)] if file.exists() else []


def check_the_engine_is_replaced(
    hosts: TwoHosts, host: int, matches: Callable[[psutil.Process], bool], run_dir: Path, logs: Path
) -> None:
    """Kill a process of the engine: all its ranks are replaced, and the run goes on with the current weights."""
    before = engine_events(run_dir)
    old = [*matching(hosts, 0, is_rank), *matching(hosts, 1, is_rank)]
    assert len(old) == 2
    (process,) = matching(hosts, host, matches)
    process.kill()
    deadline = time.monotonic() + START_LIMIT_S
    while engine_events(run_dir) != [*before, "lost", "serves"]:
        ends = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in logs.rglob("*.log"))
        assert time.monotonic() < deadline, f"{engine_events(run_dir)}\n{ends}"
        time.sleep(0.5)
    wait_until_gone({process.pid: process for process in old})
    wait_for_step(run_dir, max(train_steps(run_dir)) + 2, logs)


def check_probes(run_dir: Path) -> None:
    """Every version went to both hosts, and the engine had the trainer's log-probs after each update.

    A step whose update found no engine has no probe: the replacement was probed before it served.
    """
    rows = [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl")]
    differences = [row["weight_sync/probe_diff_max"] for row in rows if "weight_sync/probe_diff_max" in row]
    assert len(differences) >= len(rows) - len(FAULTS)
    assert all(0 <= difference < ENGINE_LOG_PROB for difference in differences)
    assert all(row["weight_sync/relay_bytes"] > 0 for row in rows)
    assert rows[-1]["rollout/engine_restarts"] == len(FAULTS)


def test_an_engine_on_two_hosts_is_replaced_whichever_of_its_processes_is_killed(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = write_config(tmp_path, run_dir)
    nodes = torchrun_nodes(hosts, tmp_path, str(config), *SETTINGS)
    wait_for_step(run_dir, 2, tmp_path)
    placed = (tmp_path / "node-0.log").read_text()
    assert f"{hosts.addresses[0]}: 1 trainer ranks, engine 0 (node 2 of 2)" in placed
    assert f"{hosts.addresses[1]}: 1 trainer ranks, engine 0 (node 1 of 2)" in placed
    check_only_ray_listens_on_all_interfaces(hosts)
    stores = weight_stores(hosts)
    for host, matches in FAULTS:
        check_the_engine_is_replaced(hosts, host, matches, run_dir, tmp_path)
    processes = on_both(hosts)
    nodes[0].terminate()
    assert nodes[0].wait(timeout=START_LIMIT_S) == INTERRUPTED, (tmp_path / "node-0.log").read_text()
    nodes[1].wait(timeout=START_LIMIT_S)
    wait_until_gone(processes)
    wait_until_gone(on_both(hosts))
    assert [store for store in stores if store.exists()] == []
    check_probes(run_dir)
