"""Scores a rollout batch and records which experts its tokens use, for routing replay in the updates on the batch.

Updates pack the trajectories differently from the scoring pass, so a trajectory may be trained by another data-parallel
rank. The routes are therefore summed over the ranks of a pipeline stage, each of which has recorded different tokens.

Legend: A tokens that this rank's routers have seen; M tokens of a message; L layers with experts of this pipeline
stage; K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from megatron_bapo.model.routing_replay import RoutingReplay
from megatron_bapo.parallel.collectives import sum_over
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.micro_batches import Example, input_positions
from megatron_bapo.trainer.scatter_routes import members_of_messages
from megatron_bapo.trainer.trajectory_sums import indices_with_tokens
from megatron_bapo.trainer.worker import Worker, gather_log_probs, score

MESSAGE_BYTES = 64 << 20
"""Bytes of routes that are summed at once, or those of one trajectory if it has more."""


def score_and_record(
    worker: Worker, trajectories: Sequence[Trajectory], temperature: float
) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
    """Return the log-probs of each trajectory as `score_trajectories` does, and the routes of that pass.

    The routes are [P+R-1, L, K], int8 or int16, and None for trajectories whose tokens this rank does not have. The
    model must have routing replay. Collective.
    """
    routing = worker.model.routing
    assert routing is not None, "the model records routes"
    examples = [Example(trajectory, advantage=0.0, weight=0.0) for trajectory in trajectories]
    plan = worker.plan(examples)
    micro_batches = worker.lay_out(examples, plan)
    recorded = [routing.empty(len(micro_batch.tokens_T)) for micro_batch in micro_batches]
    scores = score(worker, micro_batches, temperature, recorded=recorded)
    log_probs = gather_log_probs(worker, examples, plan, micro_batches, scores)
    return log_probs, _gather(worker, routing, examples, plan, recorded)


def _gather(
    worker: Worker,
    routing: RoutingReplay,
    examples: Sequence[Example],
    plan: Sequence[Sequence[int]],
    recorded: Sequence[torch.Tensor],
) -> list[np.ndarray | None]:
    groups, routes = worker.groups, list[np.ndarray | None]([None] * len(examples))
    if not routing.layers:
        return routes
    starts = np.cumsum([0, *(example.num_input_tokens for example in examples)])
    places_A = torch.cat([routing.own_part(places) for places in _places(worker, examples, plan, starts)])
    # NCCL cannot sum int16. As every token is recorded once, the sum of its bytes is the route itself.
    values = torch.cat([own.flatten(1).view(torch.uint8) for own in recorded])
    axes = [groups.data_context] if routing.num_parts == 1 else [groups.tensor, groups.data_context]
    kept = set(indices_with_tokens([example.trajectory for example in examples]))
    for members in members_of_messages(np.diff(starts) * values.shape[1], MESSAGE_BYTES):
        start, end = starts[members.start], starts[members.stop]
        table = torch.zeros(int(end - start), values.shape[1], dtype=torch.uint8, device=local_device())
        own = (places_A >= start) & (places_A < end)
        table[places_A[own] - start] = values[own]
        sum_over(*axes)(table)
        found_MLK = table.view(routing.dtype).unflatten(1, (len(routing.layers), -1)).cpu().numpy()
        for index in kept.intersection(members):
            routes[index] = found_MLK[starts[index] - start : starts[index + 1] - start].copy()
    return routes


def _places(
    worker: Worker, examples: Sequence[Example], plan: Sequence[Sequence[int]], starts: np.ndarray
) -> Iterator[torch.Tensor]:
    """Yield for each micro-batch the place of its tokens among the input tokens of all examples, -1 for padding."""
    rule, context = worker.config.padding_rule, worker.groups.context
    for indices in plan:
        members = [examples[i] for i in indices]
        allocated = rule.allocated([example.num_input_tokens for example in members])
        places = np.full(allocated // context.size, -1)
        parts = input_positions(members, rule, context)
        found = [
            np.where(p < starts[i + 1] - starts[i], starts[i] + p, -1) for i, p in zip(indices, parts, strict=True)
        ]
        joined = np.concatenate([np.zeros(0, np.int64), *found])
        places[: len(joined)] = joined
        yield torch.from_numpy(places).to(local_device())
