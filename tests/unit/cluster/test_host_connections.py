"""A sender and a receiver of one gloo message, each a process."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch

from tests.processes import suspended

NUM_BYTES = 1 << 30
PROGRAM = f"""
import sys, time
from pathlib import Path
import torch
from torch._C._distributed_c10d import FileStore
from megatron_bapo.cluster.host_connections import HostConnections
from megatron_bapo.parallel.platform import host_group

rank, folder, turn_s = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
connections = HostConnections()
with connections.opening(1.0):
    group = host_group(FileStore(str(folder / "rendezvous"), 2), rank, 2, "127.0.0.1", 300.0)
with connections.needed():
    if rank == 0:
        group.send([torch.ones({NUM_BYTES}, dtype=torch.uint8)], 1, 0).wait()
        print("sent")
    else:
        time.sleep(turn_s)
        arrived = torch.from_file(str(folder / "arrived"), shared=True, size={NUM_BYTES}, dtype=torch.uint8)
        group.recv([arrived], 0, 0).wait()
        print("received", int(arrived[-1]))
"""


def start(folder: Path, rank: int, turn_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(rank), str(folder), str(turn_s)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    arrived = tmp_path / "arrived"
    with arrived.open("wb") as file:
        file.truncate(NUM_BYTES)
    yield tmp_path
    arrived.unlink()


def test_a_host_may_wait_longer_for_its_turn_than_another_host_may_be_silent(folder: Path) -> None:
    processes = [start(folder, rank, turn_s=5.0) for rank in (0, 1)]
    assert [process.communicate(timeout=300)[0] for process in processes] == ["sent\n", "received 1\n"]


def test_a_receiver_ends_when_its_sender_dies_within_a_message(folder: Path) -> None:
    """gloo would let it wait for the limit of 300 s."""
    arrived = torch.from_file(str(folder / "arrived"), shared=True, size=NUM_BYTES, dtype=torch.uint8)
    with ExitStack() as stack:
        sender, receiver = (stack.enter_context(start(folder, rank, turn_s=0.0)) for rank in (0, 1))
        stack.callback(sender.kill)
        stack.callback(receiver.kill)
        while not arrived[0]:
            assert receiver.poll() is None, receiver.communicate()
        with suspended([psutil.Process(receiver.pid)]):
            assert not arrived[-1], "all has arrived before the receiver was suspended"
            sender.kill()
            sender.wait(timeout=60)
        output, _ = receiver.communicate(timeout=120)
    assert "the connection to 127.0.0.1 has closed within a message; this process ends" in output
    assert receiver.returncode == 1
