"""Routing replay: routers of mixture-of-experts layers record the experts that they choose, or take recorded ones.

Legend: T tokens of a micro-batch on this context-parallel rank; R of them that the routers of this rank see, which are
fewer only under sequence parallelism; L layers with experts of this pipeline stage; K experts of a token; E experts of
a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.records import NO_ROUTE

ROUTE_DTYPES = {1: torch.int8, 2: torch.int16}
"""Types of expert numbers by their size in bytes (`Architecture.route_item_bytes`)."""


class LayerReplay:
    """Chooses the experts of one layer. Megatron's router calls `get_replay_topk` instead of its own top-k.

    Megatron's `RouterReplay` has the same method, but one global list of routers for all models of a process, and it
    cannot mix recorded and free tokens.
    """

    def __init__(self) -> None:
        self._routes_RK: Tensor | None = None
        self._records = self._trains = False
        self._checkpointed: deque[Tensor | None] = deque()

    def start(self, *, trains: bool) -> None:
        """Begin a pass over several micro-batches, which is followed by backward passes if it `trains`."""
        self._routes_RK, self._trains = None, trains
        self._checkpointed.clear()

    def enter(self, routes_RK: Tensor | None, *, records: bool) -> None:
        """Begin the forward pass of a micro-batch: write its routes if it `records`, otherwise take those that exist.

        Without routes the router chooses by itself.
        """
        self._routes_RK, self._records = routes_RK, records

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and numbers of the chosen experts, [R, K] each, from the scores [R, E] of all experts.

        Replayed experts keep their gradient: their scores are those that the router computes now.
        """
        assert default_compute_topk is not None, "Megatron passes its own top-k"
        routes_RK = self._routes_of_this_call()
        values_RK, chosen_RK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if routes_RK is None:
            return values_RK, chosen_RK
        if self._records:
            routes_RK.copy_(chosen_RK)
            return values_RK, chosen_RK
        chosen_RK = torch.where(routes_RK == NO_ROUTE, chosen_RK, routes_RK.to(chosen_RK.dtype))
        return scores.gather(1, chosen_RK), chosen_RK

    def _routes_of_this_call(self) -> Tensor | None:
        """Return the routes of the micro-batch that is computed, or computed again in a backward pass.

        A checkpointed layer runs its forward pass without gradients and repeats it inside the backward pass, when the
        forward passes of later micro-batches have begun. Every schedule runs the backward passes of a model chunk in
        the order of its forward passes.
        """
        if torch._C._current_graph_task_id() != -1:
            return self._checkpointed.popleft()
        if self._trains and not torch.is_grad_enabled():
            self._checkpointed.append(self._routes_RK)
        return self._routes_RK


@dataclass(frozen=True)
class RoutingReplay:
    """Routing replay of the layers of one pipeline stage."""

    chunks: tuple[tuple[LayerReplay, ...], ...]
    """Layers with experts of each model chunk."""
    layers: tuple[int, ...]
    """Numbers [L] of these layers, in the order of the chunks, among the layers with experts of the whole model."""
    num_experts_per_tok: int
    dtype: torch.dtype
    part: int = 0
    num_parts: int = 1
    """Under sequence parallelism, the number of parts of a micro-batch and which of them this rank's routers see."""

    @staticmethod
    def install(
        architecture: Architecture, chunks: Sequence[Any], groups: ParallelGroups, *, sp: bool
    ) -> RoutingReplay:
        """Connect to the routers of a stage's model chunks (`Chunk`). `sp`: the layout has sequence parallelism."""
        ordinals = {layer: ordinal for ordinal, layer in enumerate(sorted(architecture.moe_layers))}
        layers, replays = list[int](), list[tuple[LayerReplay, ...]]()
        for chunk in chunks:
            found = list[LayerReplay]()
            for number, layer in enumerate(chunk.gpt.decoder.layers, chunk.layer_offset):
                if number in ordinals:
                    layer.mlp.router.router_replay = replay = LayerReplay()
                    found.append(replay)
                    layers.append(ordinals[number])
            replays.append(tuple(found))
        part, num_parts = (groups.tensor.rank, groups.tensor.size) if sp else (0, 1)
        dtype = ROUTE_DTYPES[architecture.route_item_bytes]
        return RoutingReplay(tuple(replays), tuple(layers), architecture.num_experts_per_tok, dtype, part, num_parts)

    def empty(self, num_tokens: int) -> Tensor:
        """Return room for the recorded routes of a micro-batch of `num_tokens` = T tokens, [R, L, K]."""
        shape = (num_tokens // self.num_parts, len(self.layers), self.num_experts_per_tok)
        return torch.full(shape, NO_ROUTE, dtype=self.dtype, device=local_device())

    def own_part(self, tokens_T: Tensor) -> Tensor:
        """Return the R of T rows that belong to tokens of this rank's routers."""
        return tokens_T.chunk(self.num_parts)[self.part]

    def start(self, *, trains: bool) -> None:
        """Begin a pass over several micro-batches."""
        for layers in self.chunks:
            for layer in layers:
                layer.start(trains=trains)

    def enter(self, chunk: int, routes_RLK: Tensor | None, *, records: bool) -> None:
        """Begin the forward pass of a micro-batch through a model chunk."""
        first = sum(len(layers) for layers in self.chunks[:chunk])
        if routes_RLK is not None:  # Routes to replay are in host memory; only those of passes in flight are copied.
            routes_RLK = routes_RLK[:, first : first + len(self.chunks[chunk])].to(local_device())
        for column, layer in enumerate(self.chunks[chunk]):
            layer.enter(None if routes_RLK is None else routes_RLK[:, column], records=records)
