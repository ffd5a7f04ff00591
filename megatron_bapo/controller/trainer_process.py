"""The trainer's processes on one machine: torchrun, and under it one process a rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_bapo.controller.cluster import SEVERAL_MACHINES
from megatron_bapo.controller.interrupts import end_with_parent
from megatron_bapo.errors import UserError
from megatron_bapo.logs import last_lines

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_GENTLY_S, _POLL_S = 10.0, 0.1
_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    # In one hardware queue a collective starts before the product that is to hide it (Megatron-Core asks for this with
    # tensor and sequence parallelism on Hopper and older).
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
"""Environment variables that users may set otherwise."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the torchruns of several machines meet."""

    num_nodes: int
    endpoint: str
    is_here: bool


@dataclass(frozen=True)
class TrainerNode:
    """What the trainer ranks of one machine are told."""

    run_dir: Path
    source: tuple[str, str]
    """The argument that says where rollouts come from."""
    num_ranks: int
    address: str
    """Of this machine; nothing listens on another one, but for torch's store where there are several machines."""
    host: int
    engine_hosts: tuple[int, ...]
    """Numbers of the hosts that have engines, in the plan of the weights' ways."""
    rendezvous: Rendezvous | None = None
    """None where this machine has all ranks."""


def start_trainer(node: TrainerNode, store: Path, log_file: Path) -> psutil.Popen:
    """Torchrun in a session of its own, so that Ctrl-C reaches only the launcher; it ends with this process."""
    with log_file.open("ab") as log:
        return psutil.Popen(
            torchrun(node, store),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**_DEFAULTS, **os.environ, **_environment(node)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def torchrun(node: TrainerNode, store: Path) -> list[str]:
    """The command line; `store` is the folder of the machine's weight store."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(node.num_ranks)),
        *("--rdzv-backend", "c10d", "--local-addr", node.address, *_meeting(node, store)),
        *("-m", "megatron_bapo.controller.trainer_rank", str(node.run_dir), *node.source),
        *("--store", str(store), "--address", node.address),
        *("--host", str(node.host), "--engine-hosts", *map(str, node.engine_hosts)),
    ]


def _meeting(node: TrainerNode, store: Path) -> Sequence[str]:
    if node.rendezvous is None:
        # Files in the private store instead of a TCP store, which would listen on every interface.
        return "--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(store / "rendezvous")
    return (
        *("--nnodes", str(node.rendezvous.num_nodes), "--rdzv-endpoint", node.rendezvous.endpoint),
        *("--rdzv-id", node.run_dir.name, "--rdzv-conf", f"is_host={int(node.rendezvous.is_here)}"),
    )


def _environment(node: TrainerNode) -> dict[str, str]:
    interface = interface_of(node.address)
    environment = {"GLOO_SOCKET_IFNAME": interface}
    if interface != _LOOPBACK_INTERFACE:
        environment["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", interface)
    if node.rendezvous is None:
        # Keeps the agent from opening a TCP store of its own for the ranks.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    else:
        environment[SEVERAL_MACHINES] = "1"
    return environment


def interface_of(address: str) -> str:
    """The network interface that has this address; UserError where none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise UserError(f"no network interface of this machine has the address {address}; see `ip -brief address`")


def killed_rank(log_file: Path) -> str | None:
    """Which rank a signal has ended, by what torchrun writes last; None where it tells of none."""
    summary = last_lines(log_file, 40).rpartition("Failures:")[2]
    for rank, number in re.findall(r"rank\s+: (\d+) .*\n\s+exitcode\s+: -(\d+) ", summary):
        if int(number) != signal.SIGTERM:  # by which torchrun itself ends the others
            return f"trainer rank {rank} was ended by {signal.Signals(int(number)).name}"
    return None


def end(process: psutil.Popen) -> None:
    """End a process and all its descendants, gently at first."""
    with suppress(psutil.NoSuchProcess):
        end_all([process, *process.children(recursive=True)])


def end_all(processes: Sequence[psutil.Process]) -> None:
    """End them, gently at first."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + _GENTLY_S
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _runs(process: psutil.Process) -> bool:
    """A zombie does not: only its parent has not asked how it ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(processes: Sequence[tuple[int, float]]) -> None:
    """Kill processes of this machine, given by id and start time, that are still the same."""
    for pid, create_time in processes:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == create_time:
                process.kill()
