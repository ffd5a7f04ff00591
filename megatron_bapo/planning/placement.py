"""Placement of trainer ranks and engines on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError

Role = Literal["trainer", "rollout", "any"]
SHOWN_NODES = 8
"""Nodes that a message about too few of them names."""


@dataclass(frozen=True)
class Node:
    """A machine of the Ray cluster."""

    node_id: str
    address: str
    num_gpus: int = 0
    role: Role = "any"


def alike_nodes(num: int, num_gpus: int, role: Role = "any") -> list[Node]:
    """Return nodes for a run that is only planned."""
    return [Node(f"{role} {number}", f"{role} {number}", num_gpus, role) for number in range(num)]


@dataclass(frozen=True)
class RunPlacement:
    """Nodes of a run's trainer ranks and engines."""

    trainer_nodes: tuple[Node, ...]
    ranks_per_node: int
    engine_nodes: tuple[tuple[Node, ...], ...]
    """Nodes of each engine, by engine index. The engine's ranks are spread over its nodes in order."""
    teacher_nodes: tuple[Node, ...] = ()
    """Node of each of the teacher's engines."""

    @property
    def nodes(self) -> list[Node]:
        """Every used node once."""
        return list(dict.fromkeys([*self.trainer_nodes, *self.nodes_with_engines, *self.teacher_nodes]))

    @property
    def nodes_with_engines(self) -> list[Node]:
        """Every node with ranks of an engine once."""
        return list(dict.fromkeys(node for nodes in self.engine_nodes for node in nodes))

    def engines_on(self, node: Node) -> list[int]:
        """Return the indices of the engines that have ranks on a node."""
        return [index for index, nodes in enumerate(self.engine_nodes) if node in nodes]

    def teachers_on(self, node: Node) -> list[int]:
        """Return the indices of the teacher's engines on a node."""
        return [index for index, each in enumerate(self.teacher_nodes) if each == node]

    def num_ranks_on(self, node: Node) -> int:
        """Return the number of trainer ranks on a node."""
        return self.ranks_per_node if node in self.trainer_nodes else 0

    def num_policy_gpus_on(self, node: Node, rollout: RolloutConfig) -> int:
        """Return the number of a node's GPUs that trainer ranks and engines of the policy take."""
        return rollout.num_gpus(self.num_ranks_on(node), len(self.engines_on(node)) * rollout.ranks_per_engine_node)


def place_run(config: Config, nodes: Sequence[Node]) -> RunPlacement:
    """Place trainer ranks on as few nodes as have enough GPUs, and engines on the remaining GPUs, the teacher's last.

    Nodes without a GPU are not used if others have GPUs. Without any GPU, trainer ranks are spread evenly over all
    nodes. Raises UserError if the nodes do not suffice.
    """
    used = [node for node in nodes if node.num_gpus] or list(nodes)
    trainers = _trainer_nodes(config, [node for node in used if node.role != "rollout"])
    ranks_per_node = config.parallel.world_size // len(trainers)
    placed = RunPlacement(tuple(trainers), ranks_per_node, ())
    roles = ("rollout",) if any(node.role == "rollout" for node in used) else ("any",)
    beside = [node for node in used if node.role in roles]
    if config.rollout.colocate:
        free = {node: node.num_gpus for node in trainers}
    else:
        free = {node: node.num_gpus - placed.num_ranks_on(node) for node in beside}
    place = _place_by_gpus if any(node.num_gpus for node in used) else _place_in_turn
    engines = place(config.rollout, free)
    if len(engines) < config.rollout.num_engines:
        raise UserError(_too_many_engines(config, len(engines), used))
    placed = replace(placed, engine_nodes=tuple(engines))
    if (teacher := config.serving_teacher) is None:
        return placed
    free = {node: node.num_gpus - placed.num_policy_gpus_on(node, config.rollout) for node in beside}
    teachers = place(teacher.rollout, free)
    if len(teachers) < teacher.rollout.num_engines:
        raise UserError(_too_many_teachers(teacher.rollout, len(teachers), used))
    return replace(placed, teacher_nodes=tuple(node for nodes in teachers for node in nodes))


def fewest_nodes(
    config: Config, gpus_per_node: int, role: Role, others: Sequence[Node], *, first: int, most: int
) -> int:
    """Return the smallest number of alike nodes, from `first` on, on which a run is placed beside the `others`.

    Raises UserError if `most` of them do not suffice.
    """
    place_run(config, [*alike_nodes(most, gpus_per_node, role), *others])
    for number in range(first, most):
        with suppress(UserError):
            place_run(config, [*alike_nodes(number, gpus_per_node, role), *others])
            return number
    return most


def nodes_needed(config: Config, gpus_per_node: int, engine_gpus_per_node: int | None, *, first: int) -> int:
    """Return the smallest number of nodes, from `first` on, on which a run is placed.

    All nodes are alike, or separate engines have nodes of their own kind, with `engine_gpus_per_node` GPUs each. Raises
    UserError if no number suffices.
    """
    most = first + config.rollout.num_engines * config.rollout.nodes_per_engine + config.num_teacher_ranks
    if engine_gpus_per_node is None:
        return fewest_nodes(config, gpus_per_node, "any", [], first=first, most=most)
    trainers = alike_nodes(-(-config.parallel.world_size // gpus_per_node), gpus_per_node, "trainer")
    sizes = {"first": first - len(trainers), "most": most - len(trainers)}
    return len(trainers) + fewest_nodes(config, engine_gpus_per_node, "rollout", trainers, **sizes)


def _place_by_gpus(rollout: RolloutConfig, free: Mapping[Node, int]) -> list[tuple[Node, ...]]:
    """Return the nodes of as many engines as fit on the nodes' free GPUs.

    Engines fill the nodes in order, so that few nodes are used. Engines on several nodes that do not all fit this way
    take the nodes with the most free GPUs instead.
    """
    engines = _fill(rollout, free)
    if len(engines) < rollout.num_engines and rollout.nodes_per_engine > 1:
        return _fill(rollout, free, fullest_last=True)
    return engines


def _fill(rollout: RolloutConfig, free: Mapping[Node, int], *, fullest_last: bool = False) -> list[tuple[Node, ...]]:
    num_fitting = {node: num // rollout.ranks_per_engine_node for node, num in free.items()}
    left = {node: num for node, num in num_fitting.items() if num}
    position = {node: index for index, node in enumerate(left)}
    engines: list[tuple[Node, ...]] = []
    while len(engines) < rollout.num_engines and len(left) >= rollout.nodes_per_engine:
        usable = sorted(left, key=lambda node: -left[node]) if fullest_last else left
        chosen = list(islice(usable, rollout.nodes_per_engine))
        engines.append(tuple(sorted(chosen, key=position.__getitem__)))
        for node in chosen:
            left[node] -= 1
            if not left[node]:
                del left[node]
    return engines


def _place_in_turn(rollout: RolloutConfig, free: Mapping[Node, int]) -> list[tuple[Node, ...]]:
    """Return the nodes of engines that share cores: they go to the nodes in turn, the last node first."""
    order, num = list(free)[::-1], rollout.nodes_per_engine
    if len(order) < num:
        return []
    return [
        tuple(order[(index * num + position) % len(order)] for position in range(num))
        for index in range(rollout.num_engines)
    ]


def _too_many_engines(config: Config, num_fitting: int, nodes: Sequence[Node]) -> str:
    rollout = config.rollout
    return (
        f"rollout.num_engines={rollout.num_engines} of {rollout.ranks_per_engine} ranks each, but only {num_fitting} "
        f"fit on the GPUs that the trainer's {config.parallel.world_size} ranks leave free on {_described(nodes)}; "
        f"with rollout.nodes_per_engine={rollout.nodes_per_engine} an engine needs {rollout.ranks_per_engine_node} "
        "GPUs on each of its nodes. Lower num_engines, add nodes, change nodes_per_engine, or set rollout.colocate=true"
    )


def _too_many_teachers(engines: RolloutConfig, num_fitting: int, nodes: Sequence[Node]) -> str:
    return (
        f"algorithm.distillation.engines.num_engines={engines.num_engines} of {engines.ranks_per_engine} ranks each, "
        f"but only {num_fitting} fit on the GPUs that trainer and engines leave free on {_described(nodes)}; an engine "
        "of the teacher is on one node. Lower num_engines or tensor_parallel_size, or add nodes"
    )


def _trainer_nodes(config: Config, nodes: Sequence[Node]) -> list[Node]:
    world_size = config.parallel.world_size
    if not nodes:
        raise UserError("no node of the cluster may have trainer ranks; start some with BAPO_ROLE=trainer or any")
    ranks_per_node = min(node.num_gpus for node in nodes)
    num_nodes = -(-world_size // ranks_per_node) if ranks_per_node else min(len(nodes), world_size)
    if num_nodes > len(nodes) or world_size % num_nodes:
        raise UserError(
            f"parallel.world_size={world_size} trainer ranks must spread evenly over nodes, with the same number on "
            f"each; the nodes are {_described(nodes)}. Add nodes, or change parallel.world_size"
        )
    return list(nodes[:num_nodes])


def _described(nodes: Sequence[Node]) -> str:
    shown = ", ".join(f"{node.address} ({node.num_gpus} GPUs)" for node in nodes[:SHOWN_NODES])
    return shown if len(nodes) <= SHOWN_NODES else f"{shown} and {len(nodes) - SHOWN_NODES} more"
