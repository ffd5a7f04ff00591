"""The trainer's processes on one machine: torchrun and one process per rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_bapo.cluster.interrupts import end_with_parent
from megatron_bapo.cluster.ray_cluster import SEVERAL_MACHINES
from megatron_bapo.errors import UserError

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo"
_TERMINATE_TIMEOUT_S, _POLL_S = 10.0, 0.1
_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    # With one hardware queue a collective starts before the matrix product that overlaps it; Megatron-Core requires
    # this for tensor and sequence parallelism on Hopper and older.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # A rank that a library crashes writes to its log where each of its threads was.
    "PYTHONFAULTHANDLER": "1",
}
"""Default environment variables, which the user's environment overrides."""


@dataclass(frozen=True)
class Rendezvous:
    """Rendezvous of the torchruns of several machines."""

    num_nodes: int
    endpoint: str
    """HOST:PORT on the first machine."""
    node: int
    """Number of this machine, from 0."""


@dataclass(frozen=True)
class TrainerNode:
    """Launch parameters of the trainer ranks of one machine."""

    run_dir: Path
    source: tuple[str, str]
    """Command-line option and value for the source of rollouts."""
    num_ranks: int
    address: str
    """Address of this machine. Ranks listen on no other."""
    host: int
    """Number of this host in the weight transfer plan."""
    engine_hosts: tuple[tuple[int, ...], ...]
    """For each of an engine's nodes, the numbers of the hosts at this position in all engines, in the weight transfer
    plan."""
    rendezvous: Rendezvous | None = None
    """None if this machine has all ranks."""


def start_trainer(node: TrainerNode, store: Path, log_file: Path) -> psutil.Popen:
    """Start torchrun in its own session, so that Ctrl-C reaches only the launcher; it ends with this process."""
    with log_file.open("ab") as log:
        return psutil.Popen(
            torchrun(node, store),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**_DEFAULTS, **_inherited_environment(), **_environment(node)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def torchrun(node: TrainerNode, store: Path) -> list[str]:
    """Return the command line; `store` is the folder of the machine's weight store."""
    return [
        *(sys.executable, "-m", *_rendezvous_options(node, store)),
        *("--nproc-per-node", str(node.num_ranks), "--local-addr", node.address),
        *("--log-dir", str(store / "torchrun")),  # removed with the store, unlike torchrun's own temporary folder
        *("-m", "megatron_bapo.controller.trainer_rank", str(node.run_dir), *node.source),
        *("--store", str(store), "--address", node.address),
        *("--host", str(node.host), "--engine-hosts", *map(_comma_separated, node.engine_hosts)),
    ]


def _comma_separated(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _rendezvous_options(node: TrainerNode, store: Path) -> Sequence[str]:
    """Return torchrun's module and its options for the rendezvous."""
    if node.rendezvous is None:
        # A file in the private store folder, because a TCP store would listen on every interface.
        file = ("--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(store / "rendezvous"))
        return "torch.distributed.run", "--rdzv-backend", "c10d", *file
    from megatron_bapo.cluster.rendezvous import BACKEND  # imports torch

    return (
        *("megatron_bapo.cluster.rendezvous", "--rdzv-backend", BACKEND, "--rdzv-id", node.run_dir.name),
        *("--nnodes", str(node.rendezvous.num_nodes), "--rdzv-endpoint", node.rendezvous.endpoint),
        *("--rdzv-conf", f"node={node.rendezvous.node}"),
    )


def _inherited_environment() -> dict[str, str]:
    """Return this process's variables without torchrun's options (PET_NNODES, …), which Kubeflow sets in pods."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PET_")}


def _environment(node: TrainerNode) -> dict[str, str]:
    environment = network_environment(node.address)
    if node.rendezvous is None:
        # Keeps torchrun's agent from opening a TCP store for the ranks.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    else:
        environment[SEVERAL_MACHINES] = "1"
    return environment


def network_environment(address: str) -> dict[str, str]:
    """Return the environment variables that make gloo and NCCL use the network interface with this address."""
    interface = interface_of(address)
    if interface == _LOOPBACK_INTERFACE:
        return {"GLOO_SOCKET_IFNAME": interface}
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", f"={interface}"),  # without "=" a prefix
    }


def interface_of(address: str) -> str:
    """Return the network interface with this address. Raises UserError if there is none."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    raise UserError(f"no network interface of this machine has the address {address}; see `ip -brief address`")


class TrainerLog:
    """The log of one machine's trainer ranks; earlier starts of the run may have written to the same file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._start = file.stat().st_size if file.exists() else 0

    def killed_rank(self) -> str | None:
        """Describe the rank that a signal has killed, according to torchrun's summary; None if there is none."""
        if not self.file.exists():
            return None
        summary = self.file.read_bytes()[self._start :].decode(errors="replace").rpartition("Failures:")[2]
        for rank, number in re.findall(r"rank\s+: (\d+) .*\n\s+exitcode\s+: -(\d+) ", summary):
            if int(number) != signal.SIGTERM:  # torchrun itself ends the other ranks with SIGTERM
                return f"trainer rank {rank} was killed by {signal.Signals(int(number)).name}"
        return None


def end(process: psutil.Popen) -> None:
    """Terminate a process and all its descendants; kill those that do not end in time."""
    with suppress(psutil.NoSuchProcess):
        end_all([process, *process.children(recursive=True)])


def end_all(processes: Sequence[psutil.Process]) -> None:
    """Terminate processes; kill those that do not end in time."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + _TERMINATE_TIMEOUT_S
    while (alive := [process for process in processes if _is_running(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie, whose parent has not read its exit code, does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
