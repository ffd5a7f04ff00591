import subprocess
import sys

import pytest

SCRIPT = """
import threading, time
import psutil
from tests.processes import is_alive, title
from megatron_bapo.cluster.ray_cluster import local_cluster, nodes

def stop_the_first_raylet():
    while not (found := [p for p in psutil.Process().children(recursive=True) if title(p) == "raylet"]):
        time.sleep(0.001)
    found[0].suspend()
    print("stopped", found[0].pid, flush=True)

threading.Thread(target=stop_the_first_raylet).start()
with local_cluster(1, 80, "test"):
    raylets = [p for p in psutil.Process().children(recursive=True) if title(p) == "raylet"]
    print("started", len(nodes()), *[p.pid for p in raylets if is_alive(p)], flush=True)
"""


@pytest.mark.slow
def test_ray_is_started_again_if_its_processes_are_too_slow():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    stopped, started = (line.split() for line in run.stdout.splitlines())
    assert started[:2] == ["started", "1"]
    assert len(started) == 3
    assert stopped[1] != started[2]


ASKED_TO_STOP = """
import os, signal
from megatron_bapo.cluster.interrupts import Interrupts
from megatron_bapo.cluster.ray_cluster import local_cluster

with Interrupts() as interrupts, local_cluster(1, 80, "test"):
    os.kill(os.getpid(), signal.SIGTERM)
    print(interrupts.requested)
"""


@pytest.mark.slow
def test_ray_leaves_sigterm_to_the_launcher():
    run = subprocess.run([sys.executable, "-c", ASKED_TO_STOP], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "True\n"), run.stderr
