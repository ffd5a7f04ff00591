"""The run's agent on one machine of a cluster: starts trainer ranks, owns weight stores, and ends processes."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import psutil

from megatron_bapo.cluster.run_end import StopRequest
from megatron_bapo.cluster.trainer_process import TrainerNode, end, network_environment, start_trainer
from megatron_bapo.config.checks import refuse
from megatron_bapo.config.colocation_checks import layer_problems
from megatron_bapo.config.loading import load_config
from megatron_bapo.errors import UserError
from megatron_bapo.logs import redirect_output
from megatron_bapo.parallel.platform import compute_capability, has_transformer_engine, visible_devices
from megatron_bapo.rollout.engine_nodes import kill_marked
from megatron_bapo.weight_sync.transport import WeightStore

_POLL_S = 0.25
ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Keeps Ray from hiding all GPUs from an actor that requests none."""


class NodeAgent:
    """Actor on one node; it ends with the launcher, and its trainer ranks end with it."""

    def __init__(self, address: str, log_file: Path) -> None:
        self._address, self._log_file = address, log_file
        self._stores: list[WeightStore] = []
        self._trainer: psutil.Popen | None = None

    async def check(self, run_config: Path, directory: Path, num_trainer_ranks: int) -> None:
        """Check that this node sees the launcher's files, and that it can run `num_trainer_ranks` trainer ranks.

        `directory` is the launcher's working directory. Raises UserError if not.
        """
        if Path.cwd() != directory:
            raise UserError(
                f"Ray on node {self._address} was started in {Path.cwd()}, but this run was started in {directory}, to "
                "which its paths are relative; start launch/ray_node.sh in the same directory on every node"
            )
        if not run_config.is_file():
            raise UserError(
                f"node {self._address} does not see {run_config.absolute()}; run_dir must be on a file system that "
                "all nodes share"
            )
        if num_trainer_ranks:
            refuse(layer_problems(load_config(run_config, []), compute_capability(), has_transformer_engine()))
        redirect_output(self._log_file)

    async def devices(self) -> list[str]:
        """Return the GPUs of this node."""
        return visible_devices()

    async def network(self) -> dict[str, str]:
        """Return the environment variables that make gloo and NCCL use this node's network interface."""
        return network_environment(self._address)

    async def endpoint(self) -> str:
        """Return HOST:PORT of this machine with a port that is free now."""
        with socket.create_server((self._address, 0)) as server:
            return f"{self._address}:{server.getsockname()[1]}"

    async def create_store(self) -> Path:
        """Create a weight store and return its folder."""
        store = WeightStore.create()
        self._stores.append(store)
        return store.folder

    async def start_trainer(self, node: TrainerNode, store: Path, log_file: Path) -> None:
        """Start this node's trainer ranks; does nothing if they were started, because Ray may retry the call."""
        if self._trainer is None:
            self._trainer = start_trainer(node, store, log_file)

    async def until_trainer_ends(self, stop_request: Path) -> int:
        """Wait for torchrun to end and return its exit code; without trainer ranks this never returns.

        Creates the file `stop_request` of the run when the node is asked to end.
        """
        asked = StopRequest()
        while self._trainer is None or self._trainer.poll() is None:
            if asked.is_made:
                stop_request.touch()
            await asyncio.sleep(_POLL_S)
        assert self._trainer.returncode is not None
        return self._trainer.returncode

    async def kill_engine(self, mark: str) -> None:
        """Kill the processes on this node of an engine with this mark."""
        kill_marked(mark)

    async def close(self) -> None:
        """End the trainer ranks and remove the weight stores."""
        if self._trainer is not None:
            await asyncio.to_thread(end, self._trainer)
        for store in self._stores:
            store.close()
