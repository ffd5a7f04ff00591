"""Weights from trainer ranks straight to the ranks of engines on two hosts (weight_sync.transport=nccl, over gloo).

The hosts are network namespaces. Each has a trainer rank and an engine, so that the second engine of a chain receives
from the first one, which is on the other host.
"""

import re
import time
from pathlib import Path

import pytest

from megatron_bapo.errors import INTERRUPTED
from megatron_bapo.metrics.sinks import read_rows
from tests.cluster.launched import START_LIMIT_S, train_steps, wait_for_step, write_config
from tests.cluster.test_engine_on_two_hosts import engine_events
from tests.cluster.test_two_hosts import (
    check_only_ray_listens_on_all_interfaces,
    on_both,
    torchrun_nodes,
    wait_until_gone,
)
from tests.cluster.two_hosts import TwoHosts
from tests.processes import title
from tests.tolerances import ENGINE_LOG_PROB

pytestmark = pytest.mark.cluster_full

SETTINGS = (
    *("weight_sync.transport=nccl", "rollout.num_engines=2", "rollout.kv_cache_gib=0.02"),
    *("rollout.health_check_interval_s=1", "trainer.max_restarts=0"),
)


def transfers(run_dir: Path) -> list[dict[str, float]]:
    """Return the metrics of the steps so far."""
    return [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl")]


def test_engines_on_two_hosts_get_every_version_from_the_trainers_ranks_and_a_killed_one_comes_back(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    nodes = torchrun_nodes(hosts, tmp_path, str(write_config(tmp_path, run_dir)), *SETTINGS)
    wait_for_step(run_dir, 2, tmp_path)
    placed = re.findall(r"(\S+): 1 trainer ranks, engine ([01])\b", (tmp_path / "node-0.log").read_text())
    assert sorted(host for host, _ in placed) == sorted(hosts.addresses), placed
    assert sorted(engine for _, engine in placed) == ["0", "1"], placed
    check_only_ray_listens_on_all_interfaces(hosts)
    (engine,) = [each for each in hosts.processes(1).values() if title(each).startswith("ray::Engine")]
    engine.kill()
    deadline = time.monotonic() + START_LIMIT_S
    while engine_events(run_dir) != ["lost", "serves"]:
        assert time.monotonic() < deadline, f"{engine_events(run_dir)}\n{(tmp_path / 'node-0.log').read_text()}"
        time.sleep(0.5)
    wait_for_step(run_dir, max(train_steps(run_dir)) + 2, tmp_path)
    processes = on_both(hosts)
    nodes[0].terminate()
    assert nodes[0].wait(timeout=START_LIMIT_S) == INTERRUPTED, (tmp_path / "node-0.log").read_text()
    nodes[1].wait(timeout=START_LIMIT_S)
    wait_until_gone(processes)
    rows = transfers(run_dir)
    assert all(0 <= row["weight_sync/probe_diff_max"] < ENGINE_LOG_PROB for row in rows)
    # Every slice leaves the trainer once per group, however many engines there are.
    assert rows[0]["weight_sync/relay_bytes"] == rows[0]["weight_sync/store_bytes"]
    assert rows[-1]["weight_sync/relay_bytes"] == rows[-1]["weight_sync/store_bytes"]
    assert rows[-1]["rollout/engine_restarts"] == 1
