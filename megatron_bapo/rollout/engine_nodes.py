"""Engines whose ranks are on several nodes.

vLLM's core and rank 0 run on the first node; each other node runs vLLM's executor without an engine, as `vllm serve
--headless` does. All ranks meet in a store on the first node. vLLM notices neither when an idle rank of another node
dies nor when a node is lost, so the rollout plane asks the followers for their ranks, and replaces the whole engine.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatron_bapo.logs import redirect_output
from megatron_bapo.rollout.engine_spec import EngineSpec
from megatron_bapo.rollout.messages import EngineLost

if TYPE_CHECKING:
    from megatron_bapo.rollout.vllm_adapter import VllmFollower

_SHARED_MEMORY = "/dev/shm/psm_"
"""Prefix of the files of Python's multiprocessing.shared_memory."""
ENGINE_MARK = "MEGATRON_BAPO_ENGINE"
"""Environment variable of an engine's processes, also of those that vLLM starts; each start has a value of its own."""


def node_environment(address: str) -> dict[str, str]:
    """Return the environment variables with which ranks listen on this node's address, for those of other nodes."""
    return {
        "VLLM_HOST_IP": address,
        # Rank 0 joins the store of `Meeting` instead of opening its own, which would listen on every interface.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class Meeting:
    """The store in which the ranks of an engine on several nodes find each other; it listens on one address only."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Listen on a free port of this node's address; `timeout_s` limits each wait for an entry."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=4096)
        port = listener.getsockname()[1]
        from torch._C._distributed_c10d import TCPStore  # here, because the rollout service imports no torch

        self._store = TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
        self.endpoint = f"{address}:{port}"
        """HOST:PORT of the store."""


@dataclass(frozen=True)
class StartedRanks:
    """The ranks of an engine on one node."""

    processes: tuple[int, ...]
    """Ids of the actor's own process and of vLLM's processes on the node."""


def own_processes() -> tuple[int, ...]:
    """Return the ids of this process and all its descendants."""
    own = psutil.Process()
    return tuple(process.pid for process in [own, *own.children(recursive=True)])


def kill_marked(mark: str) -> None:
    """Kill all processes of this machine whose `ENGINE_MARK` has this value.

    vLLM's processes outlive an actor that is killed, and are not known before it has started.
    """
    killed = set[int]()
    while found := set(_marked(mark)) - killed:  # again, because a process may have started another one meanwhile
        for pid in found:
            with suppress(OSError):  # the process has ended
                os.kill(pid, signal.SIGKILL)
        killed |= found


def _marked(mark: str) -> Iterator[int]:
    entry = f"{ENGINE_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def unlink_shared_memory(processes: Sequence[int]) -> None:
    """Remove the names of Python's shared memory that these processes have mapped.

    vLLM's message queues are such memory, and would stay in /dev/shm when their processes are killed. Without names the
    memory is freed when its last process ends. All processes must have mapped what they use.
    """
    for pid in processes:
        with suppress(OSError):  # the process has ended
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.split(maxsplit=5)[5:]
                if path and path[0].startswith(_SHARED_MEMORY):
                    Path(path[0]).unlink(missing_ok=True)


class EngineFollower:
    """Owns the ranks of an engine on one of its further nodes; the rollout plane runs it as a Ray actor."""

    def __init__(self, log_file: Path | None = None) -> None:
        """`log_file` receives the output of this process and of vLLM's processes, if given."""
        if log_file is not None:
            redirect_output(log_file)
        self._ranks: VllmFollower | None = None
        self._place = "a node on which it was not started"

    async def start(self, spec: EngineSpec, scratch: Path, node: int, endpoint: str) -> StartedRanks:
        """Start the ranks of node `node`, which meet the others at `endpoint`.

        `scratch` is a folder for vLLM's temporary files. Returns when the ranks of all nodes have loaded the
        checkpoint. Raises UserError for settings that vLLM refuses, RunError if its processes do not start. A second
        call does nothing.
        """
        self._place = f"node {node + 1} of {spec.settings.nodes_per_engine}"
        if self._ranks is None:
            from megatron_bapo.rollout.vllm_adapter import VllmFollower

            self._ranks = VllmFollower(spec, scratch, node, endpoint)
        started = StartedRanks(own_processes())
        unlink_shared_memory(started.processes)
        return started

    async def check(self) -> None:
        """Return if the ranks run. Raises EngineLost if one has ended."""
        if self._ranks is None or self._ranks.has_failed:
            raise EngineLost(f"a rank of the engine has ended on {self._place}; the log of that node's ranks says why")
