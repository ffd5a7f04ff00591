import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

STARTER = """#!/usr/bin/env bash
# Starts Ray's raylet, but the first time stops instead.
mkdir "${0%/*}/was-started" 2>/dev/null && kill -STOP $$
exec "$RAYLET" "$@"
"""
STOPS_THE_FIRST_RAYLET = """
import os
from ray._private import services

os.environ["RAYLET"] = services.RAYLET_EXECUTABLE
services.RAYLET_EXECUTABLE = os.environ["STARTER"]
"""
SCRIPT = (
    STOPS_THE_FIRST_RAYLET
    + """
import threading, time
import psutil
from tests.processes import is_alive, status, title
from megatron_bapo.cluster.ray_cluster import local_cluster, nodes

def wait_for_the_first_raylet():
    while not (found := [p for p in psutil.Process().children(recursive=True) if status(p) == psutil.STATUS_STOPPED]):
        time.sleep(0.1)
    print("stopped", found[0].pid, flush=True)

threading.Thread(target=wait_for_the_first_raylet).start()
with local_cluster(1, 80, "test"):
    raylets = [p for p in psutil.Process().children(recursive=True) if title(p) == "raylet"]
    print("started", len(nodes()), *[p.pid for p in raylets if is_alive(p)], flush=True)
"""
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a process whose first raylet stops before it does anything."""
    (starter := tmp_path / "starter").write_text(STARTER)
    starter.chmod(0o755)
    return {**os.environ, "STARTER": str(starter)}


@pytest.mark.slow
def test_ray_is_started_again_if_its_processes_are_too_slow(environment: dict[str, str]):
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    assert "is still running" not in run.stderr, "the first processes are left to nobody"
    stopped, started = (line.split() for line in run.stdout.splitlines())
    assert started[:2] == ["started", "1"]
    assert len(started) == 3
    assert stopped[1] != started[2]


NODE = (
    STOPS_THE_FIRST_RAYLET
    + """
import os, shutil, sys, threading, time
import psutil
from tests.processes import is_alive, title
from megatron_bapo.cluster.ray_folder import ray_folder
from megatron_bapo.cluster.ray_start import main

def end_after_the_second_raylet():
    while not [p for p in psutil.Process().children(recursive=True) if title(p) == "raylet" and is_alive(p)]:
        time.sleep(0.1)
    print("tried again", flush=True)
    for child in psutil.Process().children(recursive=True):
        child.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # a third try would succeed, and `--block` would wait for its end

threading.Thread(target=end_after_the_second_raylet, daemon=True).start()
with ray_folder() as folder:
    sys.argv[1:] = ["start", "--head", "--node-ip-address=127.0.0.1", f"--port={sys.argv[1]}", "--block"]
    sys.argv += ["--include-dashboard=false", f"--temp-dir={folder}"]
    main()
"""
)


@pytest.mark.slow
def test_a_node_of_a_cluster_starts_ray_again_if_its_processes_are_too_slow(environment: dict[str, str]):
    environment |= {"RAY_AUTH_TOKEN": "0" * 64}
    command = [sys.executable, "-c", NODE, str(free_port())]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert "tried again" in run.stdout, run.stderr


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


CLOSED_TERMINAL = """
import os, signal, subprocess
import psutil
from tests.processes import is_alive, title
from megatron_bapo.cluster.interrupts import Interrupts
from megatron_bapo.cluster.ray_cluster import create_actor, get_result, local_cluster

class Engine:
    def start(self):
        subprocess.Popen(["sleep", "600"])

with Interrupts() as interrupts, local_cluster(1, 80, "test"):
    engine = create_actor(Engine, name="engine")
    get_result(engine.start.remote(), "engine", 60.0)
    processes = psutil.Process().children(recursive=True)
    assert {"gcs_server", "raylet", "sleep"} <= {title(process) for process in processes}
    os.killpg(os.getpgrp(), signal.SIGHUP)
    psutil.wait_procs(processes, timeout=2.0)
    print(interrupts.requested, [title(process) for process in processes if not is_alive(process)])
"""


@pytest.mark.slow
def test_when_a_terminal_is_closed_the_launcher_is_asked_to_stop_and_ray_goes_on():
    command = [sys.executable, "-c", CLOSED_TERMINAL]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, start_new_session=True)
    assert (run.returncode, run.stdout) == (0, "True []\n"), run.stderr
