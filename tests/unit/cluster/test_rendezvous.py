import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_bapo.cluster.rendezvous import BACKEND
from tests.ports import free_port

ADDRESS = "127.0.0.2"
RANK = """
import os, pathlib, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
folder = pathlib.Path({folder!r})
(folder / f"rank-{{dist.get_rank()}}").write_text(f"{{total.item()}} of {{dist.get_world_size()}}")
while not (folder / "end").exists():
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_two_nodes_meet_in_a_store_that_listens_on_one_address_only(tmp_path: Path) -> None:
    """Both nodes are on this machine; all of 127.0.0.0/8 is the loopback interface."""
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(folder=str(tmp_path)))
    endpoint = f"{ADDRESS}:{free_port()}"
    command = [sys.executable, "-m", "megatron_bapo.cluster.rendezvous", "--rdzv-backend", BACKEND, "--nnodes", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    nodes = []
    for node in (1, 0):  # the second node waits for the first
        options = ["--rdzv-endpoint", endpoint, "--rdzv-id", "run", "--rdzv-conf", f"node={node}"]
        with (tmp_path / f"node-{node}.log").open("wb") as log:
            started = [*command, *options, "--nproc-per-node", "1", str(script)]
            nodes.append(psutil.Popen(started, stdout=log, stderr=log, env=environment))
    try:
        deadline = time.monotonic() + 300
        while len(found := sorted(tmp_path.glob("rank-*"))) < 2 or not all(path.read_text() for path in found):
            logs = "".join(path.read_text() for path in tmp_path.glob("node-*.log"))
            assert all(node.poll() is None for node in nodes), logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.1)
        assert [path.read_text() for path in found] == ["3 of 2", "3 of 2"]
        listening = {
            connection.laddr.ip
            for node in nodes
            for process in (node, *node.children(recursive=True))
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert ADDRESS in listening
        assert all(address.startswith("127.") for address in listening), listening
        (tmp_path / "end").touch()
        assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            if node.poll() is None:
                for process in (*node.children(recursive=True), node):
                    process.kill()
            node.wait()
