"""Placement of trainer ranks and engines on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError

Role = Literal["trainer", "rollout", "any"]


@dataclass(frozen=True)
class Node:
    """A machine of the Ray cluster."""

    node_id: str
    address: str
    num_gpus: int = 0
    role: Role = "any"


@dataclass(frozen=True)
class RunPlacement:
    """Nodes of a run's trainer ranks and engines."""

    trainer_nodes: tuple[Node, ...]
    ranks_per_node: int
    engine_nodes: tuple[Node, ...]
    """Node of each engine, by engine index."""

    @property
    def nodes(self) -> list[Node]:
        """Every used node once."""
        return list(dict.fromkeys([*self.trainer_nodes, *self.engine_nodes]))

    def slot(self, engine: int) -> int:
        """Return the index of an engine among the engines of its node."""
        return self.engine_nodes[:engine].count(self.engine_nodes[engine])

    def num_ranks_on(self, node: Node) -> int:
        """Return the number of trainer ranks on a node."""
        return self.ranks_per_node if node in self.trainer_nodes else 0


def place_run(config: Config, nodes: Sequence[Node]) -> RunPlacement:
    """Place trainer ranks on as few nodes as have enough GPUs, and engines on the remaining GPUs.

    Nodes without a GPU are not used if others have GPUs. Without any GPU, trainer ranks are spread evenly over all
    nodes. Raises UserError if the nodes do not suffice.
    """
    used = [node for node in nodes if node.num_gpus] or list(nodes)
    trainers = _trainer_nodes(config, [node for node in used if node.role != "rollout"])
    ranks_per_node = config.parallel.world_size // len(trainers)
    engines: list[Node] = []
    if config.rollout.colocate:
        free = {node: node.num_gpus for node in trainers}
    else:
        free = {node: node.num_gpus - (ranks_per_node if node in trainers else 0) for node in used}
        free = {node: num for node, num in free.items() if node.role != "trainer"}
        if any(node.role == "rollout" for node in free):
            free = {node: num for node, num in free.items() if node.role == "rollout"}
    num_ranks = config.rollout.ranks_per_engine
    if not any(
        node.num_gpus for node in used
    ):  # cores are shared: engines go to the nodes in turn, the last node first
        order = list(free)[::-1]
        engines = [order[index % len(order)] for index in range(config.rollout.num_engines)] if order else []
    else:
        engines = [node for node, num in free.items() for _ in range(num // num_ranks)][: config.rollout.num_engines]
    if len(engines) < config.rollout.num_engines:
        raise UserError(
            f"rollout.num_engines={config.rollout.num_engines} of {num_ranks} ranks each, but only {len(engines)} fit "
            f"on the GPUs that the trainer's {config.parallel.world_size} ranks leave free on {_described(used)}; an "
            "engine stays on one node. Lower num_engines, add nodes, or set rollout.colocate=true"
        )
    return RunPlacement(tuple(trainers), ranks_per_node, tuple(engines))


def _trainer_nodes(config: Config, nodes: Sequence[Node]) -> list[Node]:
    world_size = config.parallel.world_size
    if not nodes:
        raise UserError("no node of the cluster may have trainer ranks; start some with --role trainer or any")
    ranks_per_node = min(node.num_gpus for node in nodes)
    num_nodes = -(-world_size // ranks_per_node) if ranks_per_node else min(len(nodes), world_size)
    if num_nodes > len(nodes) or world_size % num_nodes:
        raise UserError(
            f"parallel.world_size={world_size} trainer ranks must spread evenly over nodes, with the same number on "
            f"each; the nodes are {_described(nodes)}. Add nodes, or change parallel.world_size"
        )
    return list(nodes[:num_nodes])


def _described(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{node.address} ({node.num_gpus} GPUs)" for node in nodes)
