"""Both planes of a run on a running Ray cluster, which launch/ray_node.sh starts on every node.

    launcher (on a node of the cluster)
      ├─ NodeAgent on each node ─► torchrun ─► trainer ranks ─► weight store of this host
      ├─ HostStore on each host: passes weights from the trainer's stores along a chain of the engines' hosts
      └─ engines, rollout service

A host that has all trainer ranks shares its weight store with its engines; other engine hosts have their own stores.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_bapo.cluster.engine_actor import EnginePlacement
from megatron_bapo.cluster.host_store import StorePlacement
from megatron_bapo.cluster.node_agent import ENVIRONMENT, NodeAgent
from megatron_bapo.cluster.ray_cluster import ActorDied, connect, create_actor, disconnect, finished, get_result, nodes
from megatron_bapo.cluster.run_end import tell_nodes
from megatron_bapo.cluster.trainer_process import Rendezvous, TrainerLog, TrainerNode
from megatron_bapo.config.checks import refuse
from megatron_bapo.config.colocation_checks import device_problems, host_problems
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import RunError, UserError, code_of
from megatron_bapo.planning.placement import Node, RunPlacement, place_run
from megatron_bapo.rollout.engine import engine_devices
from megatron_bapo.run_directory import RunDirectory

ROLE_LABEL = "megatron-bapo/role"
NODES_TIMEOUT_S = 600.0
"""Timeout until all nodes have joined the cluster."""
_FIRST_REPORT_S, _REPORT_S = 10.0, 30.0
_POLL_S = 1.0
_AGENT_S = 120.0
"""Timeout of a node agent's calls that do not wait for others; its start may take longer."""
_LOST_NODE_S = 20.0
"""Time after a rank's failure during which Ray may still report a lost node as its cause."""


class NodeLost(RunError):
    """A node of the cluster is lost; the run cannot replace it, so it is not restarted."""


@contextmanager
def joined_cluster(config: Config, num_nodes: int, console: Console) -> Iterator[RunPlacement]:
    """Connect to the Ray cluster at RAY_ADDRESS for this context; yields the placement of the run.

    The other nodes are told of an error that ends the context, because it ends the run. Raises UserError if the cluster
    does not suffice, RunError if nodes do not join in time.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        raise UserError("--num-nodes needs RAY_ADDRESS, the address of a running Ray cluster; see launch/ray_node.sh")
    if not any(map(os.environ.get, ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))):
        raise UserError("set RAY_AUTH_TOKEN_PATH to the file with the cluster's token; see launch/ray_node.sh")
    refuse(host_problems(config, num_nodes))
    _wait_for_head(address, console)
    connect(address, str(config.run_dir), os.environ.get("BAPO_NODE_ADDRESS"))
    try:
        found = _wait_for_nodes(num_nodes, address, console)
        refuse(device_problems(config, sum(node.num_gpus for node in found)))
        placement = place_run(config, found)
        console.print(_described(placement), soft_wrap=True)
        yield placement
    except BaseException as error:
        tell_nodes(code_of(error))
        raise
    finally:
        disconnect()


def _wait_for_head(address: str, console: Console) -> None:
    host, _, port = address.rpartition(":")
    if ":" in host:
        raise UserError(f"RAY_ADDRESS={address} has an IPv6 address; nodes need IPv4 addresses")
    wait = _Wait(console)
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=_POLL_S).close()
        except ValueError:
            raise UserError(f"RAY_ADDRESS={address} must be HOST:PORT of the cluster's head") from None
        except OSError as error:
            if wait.is_over:
                raise RunError(
                    f"Ray's head at {address} did not answer within {NODES_TIMEOUT_S:.0f} s ({error}); see its log"
                ) from None
            wait.sleep(f"Ray's head at {address} ({error})")
        else:
            return


def _wait_for_nodes(num: int, address: str, console: Console) -> list[Node]:
    """Return the cluster's nodes in order when `num` nodes have joined."""
    wait = _Wait(console)
    while True:
        found = _in_order(_node(node) for node in nodes())
        if len(found) >= num:
            return found
        missing = _missing_nodes({node.address for node in found})
        if wait.is_over:
            raise RunError(
                f"{num - len(found)} of {num} nodes did not join the Ray cluster at {address} within "
                f"{NODES_TIMEOUT_S:.0f} s{missing}; it has {', '.join(node.address for node in found)}. See the nodes' "
                "logs"
            )
        wait.sleep(f"{num - len(found)} of {num} nodes{missing}")


def _in_order(found: Iterable[Node]) -> list[Node]:
    """Return the nodes in the order of their Slurm job's list, else by address."""
    places = {line.split()[-1]: place for place, line in enumerate(_job_nodes())}
    return sorted(
        found, key=lambda node: (places.get(node.address, len(places)), ip_address(node.address), node.node_id)
    )


def _job_nodes() -> list[str]:
    """Return a line "name address" for each of the job's nodes, if launch/slurm.sbatch names them."""
    return os.environ.get("BAPO_NODE_ADDRESSES", "").splitlines()


def _missing_nodes(found: set[str]) -> str:
    """Return the job's nodes whose addresses are not `found`."""
    missing = [line for line in _job_nodes() if line.split()[-1] not in found]
    return f": {', '.join(missing)}" if missing else ""


class _Wait:
    """A wait of at most NODES_TIMEOUT_S, which tells from time to time what is missing."""

    def __init__(self, console: Console) -> None:
        self._console, self._start_s, self._next_report_s = console, time.monotonic(), _FIRST_REPORT_S

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self._start_s > NODES_TIMEOUT_S

    def sleep(self, missing: str) -> None:
        """Sleep until the next look."""
        waited_s = time.monotonic() - self._start_s
        if waited_s >= self._next_report_s:
            self._console.print(f"waiting for {missing}, {waited_s:.0f} s so far", soft_wrap=True)
            self._next_report_s = waited_s + _REPORT_S
        time.sleep(_POLL_S)


def _node(info: dict[str, Any]) -> Node:
    return Node(
        info["NodeID"],
        info["NodeManagerAddress"],
        int(info["Resources"].get("GPU", 0)),
        info.get("Labels", {}).get(ROLE_LABEL, "any"),
    )


def _described(placement: RunPlacement) -> str:
    parts = []
    for node in placement.nodes:
        ranks = [f"{placement.ranks_per_node} trainer ranks"] if node in placement.trainer_nodes else []
        engines = [_described_engine(placement, index, node) for index in placement.engines_on(node)]
        teachers = [f"teacher {index}" for index in placement.teachers_on(node)]
        parts.append(f"{node.address}: {', '.join([*ranks, *engines, *teachers])}")
    return "nodes: " + "; ".join(parts)


def _described_engine(placement: RunPlacement, index: int, node: Node) -> str:
    nodes = placement.engine_nodes[index]
    part = f" (node {nodes.index(node) + 1} of {len(nodes)})" if len(nodes) > 1 else ""
    return f"engine {index}{part}"


@dataclass(frozen=True)
class Hosts:
    """Host numbers in the weight transfer plan: the trainer's hosts, then the engine hosts with their own stores."""

    placement: RunPlacement
    engine_store: str

    def of_trainer(self, node: Node) -> int:
        """Return the host number of a trainer node."""
        return self.placement.trainer_nodes.index(node)

    def of_engines(self, node: Node) -> int:
        """Return the number of the host whose weight store the engines of a node read."""
        if self._shares(node):
            return 0
        own = [other for other in self.placement.nodes_with_engines if not self._shares(other)]
        return len(self.placement.trainer_nodes) + own.index(node)

    @property
    def of_readers(self) -> tuple[tuple[int, ...], ...]:
        """For each of an engine's nodes, the numbers of the hosts at this position in all engines."""
        return tuple(
            tuple(sorted({self.of_engines(node) for node in nodes}))
            for nodes in zip(*self.placement.engine_nodes, strict=True)
        )

    def _shares(self, node: Node) -> bool:
        return self.engine_store == "shared" and self.placement.trainer_nodes == (node,)


class ClusterTrainer:
    """The trainer on all of its nodes; also watches the nodes that only have engines."""

    def __init__(
        self, agents: dict[Node, Any], placement: RunPlacement, directory: RunDirectory, logs: dict[Node, TrainerLog]
    ) -> None:
        self._names = {_agent_name(node): node for node in agents}
        self._waiting = {
            _agent_name(node): agent.until_trainer_ends.remote(directory.stop_request) for node, agent in agents.items()
        }
        self._num_running = len(logs)
        self._logs = logs
        self.log = logs[placement.trainer_nodes[0]]

    def poll(self) -> int | None:
        """Return the exit code when all nodes' ranks have ended or one has failed, None before.

        Raises NodeLost with the node's address if a node is lost.
        """
        for name in finished(self._waiting):
            exit_code = self._exit_code(name)
            self._num_running -= 1
            if exit_code != 0:
                self.look_for_lost_nodes()
                self.log = self._explaining_log(self._logs[self._names[name]])
                return exit_code
        return None if self._num_running else 0

    def _explaining_log(self, noticed: TrainerLog) -> TrainerLog:
        """Return the log of the node with a killed rank: ranks of other nodes may end, and be noticed, before it."""
        return next((log for log in [noticed, *self._logs.values()] if log.killed_rank()), noticed)

    def _exit_code(self, name: str) -> int:
        try:
            return get_result(self._waiting.pop(name), name, _AGENT_S)
        except ActorDied as error:
            node = self._names[name]
            raise NodeLost(
                f"node {node.address} is lost: {error}. The run has ended on the other nodes, too; continue from the "
                "last complete checkpoint with the same command"
            ) from error

    def look_for_lost_nodes(self) -> None:
        """Wait a while for Ray to report a lost node, which explains the failure of a rank or an engine better.

        Raises NodeLost if it does.
        """
        deadline = time.monotonic() + _LOST_NODE_S
        while self._waiting and time.monotonic() < deadline:
            for name in finished(self._waiting):
                self._exit_code(name)
            time.sleep(_POLL_S / 4)


def _agent_name(node: Node) -> str:
    return f"agent of node {node.address}"


@contextmanager
def node_agents(config: Config, placement: RunPlacement, directory: RunDirectory) -> Iterator[dict[Node, Any]]:
    """Start an agent on every used node for this context; at its end the agents end what they have started."""
    agents = {
        node: create_actor(
            NodeAgent,
            node.address,
            directory.logs / f"node-{node.address}.log",
            name=_agent_name(node),
            environment=ENVIRONMENT,
            node_id=node.node_id,
        )
        for node in placement.nodes
    }
    named = {_agent_name(node): agent for node, agent in agents.items()}
    try:
        checks = {
            _agent_name(node): agent.check.remote(directory.config, Path.cwd(), placement.num_ranks_on(node))
            for node, agent in agents.items()
        }
        for name, reference in checks.items():
            # All nodes import the same files at once, usually from one file system.
            get_result(reference, name, config.rollout.start_timeout_s)
        yield agents
    finally:
        closing = {name: agent.close.remote() for name, agent in named.items()}
        for name, reference in closing.items():
            # A lost node has nothing to close, and an error here must not replace the run's own error.
            with suppress(RunError, UserError):
                get_result(reference, name, _LOST_NODE_S)


def engine_placements(
    config: Config, placement: RunPlacement, agents: dict[Node, Any], stores: dict[int, StorePlacement], hosts: Hosts
) -> list[tuple[EnginePlacement, ...]]:
    """Return the placements of all engines on each of their nodes, by engine index."""
    found = {node: _devices_and_network(agents[node], node) for node in placement.nodes_with_engines}

    def on_node(index: int, node: Node) -> EnginePlacement:
        devices, network = found[node]
        slot = placement.engines_on(node).index(index)
        visible = engine_devices(config, slot, placement.num_ranks_on(node), devices)
        folder = stores[hosts.of_engines(node)].folder
        return EnginePlacement(folder, tuple(visible), node.address, network, node.node_id, agents[node])

    return [tuple(on_node(index, node) for node in nodes) for index, nodes in enumerate(placement.engine_nodes)]


def teacher_placements(config: Config, placement: RunPlacement, agents: dict[Node, Any]) -> list[EnginePlacement]:
    """Return the placements of the teacher's engines, by index; they have a folder of their own on their nodes."""
    found: list[EnginePlacement] = []
    if (teacher := config.serving_teacher) is None:
        return found
    for index, node in enumerate(placement.teacher_nodes):
        agent, slot = agents[node], placement.teachers_on(node).index(index)
        devices, network = _devices_and_network(agent, node)
        num_others = placement.num_policy_gpus_on(node, config.rollout)
        visible = engine_devices(teacher, slot, num_others, devices)
        folder = get_result(agent.create_store.remote(), _agent_name(node), _AGENT_S)
        found.append(EnginePlacement(folder, tuple(visible), node.address, network, node.node_id, agent))
    return found


def _devices_and_network(agent: Any, node: Node) -> list[Any]:
    """Return the node's GPUs and the environment variables that select its network interface."""
    return [get_result(call.remote(), _agent_name(node), _AGENT_S) for call in (agent.devices, agent.network)]


def create_stores(agents: dict[Node, Any], placement: RunPlacement, hosts: Hosts) -> dict[int, StorePlacement]:
    """Create every host's weight store; the result is by host number."""
    owners = {hosts.of_trainer(node): node for node in placement.trainer_nodes}
    owners |= {hosts.of_engines(node): node for node in placement.nodes_with_engines}
    folders = {host: agents[node].create_store.remote() for host, node in owners.items()}
    return {
        host: StorePlacement(get_result(folders[host], _agent_name(node), _AGENT_S), node.node_id)
        for host, node in owners.items()
    }


def start_trainers(
    directory: RunDirectory,
    source: tuple[str, str],
    placement: RunPlacement,
    agents: dict[Node, Any],
    stores: dict[int, StorePlacement],
    hosts: Hosts,
) -> ClusterTrainer:
    """Start torchrun on each of the trainer's nodes; the rendezvous is on the first node."""
    first, num_nodes = placement.trainer_nodes[0], len(placement.trainer_nodes)
    logs = {node: TrainerLog(directory.logs / f"trainer-{node.address}.log") for node in placement.trainer_nodes}
    endpoint = get_result(agents[first].endpoint.remote(), _agent_name(first), _AGENT_S) if num_nodes > 1 else ""
    for number, node in enumerate(placement.trainer_nodes):
        host = hosts.of_trainer(node)
        trainer_node = TrainerNode(
            directory.root,
            source,
            placement.ranks_per_node,
            node.address,
            host,
            hosts.of_readers,
            Rendezvous(num_nodes, endpoint, number) if num_nodes > 1 else None,
        )
        started = agents[node].start_trainer.remote(trainer_node, stores[host].folder, logs[node].file)
        get_result(started, _agent_name(node), _AGENT_S)
    return ClusterTrainer(agents, placement, directory, logs)
