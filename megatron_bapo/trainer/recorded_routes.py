"""Scores a rollout batch and records which experts its tokens use, for routing replay in the updates on the batch.

The ranks of a replica have recorded different tokens, so the routes are summed over them. Updates pack the trajectories
differently from the scoring pass, so the routes are then sent to the replicas that train on these trajectories.

Legend: A tokens that this rank's routers have seen; M tokens of a message; L layers with experts of this pipeline
stage; K experts of a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from megatron_bapo.model.routing_replay import RoutingReplay
from megatron_bapo.parallel.collectives import sum_over
from megatron_bapo.parallel.platform import local_device
from megatron_bapo.records import Trajectory
from megatron_bapo.trainer.micro_batches import Example, input_positions
from megatron_bapo.trainer.scatter_routes import members_of_messages
from megatron_bapo.trainer.token_values import for_own_trajectories
from megatron_bapo.trainer.trajectory_values import indices_with_tokens
from megatron_bapo.trainer.worker import Worker, gather_log_probs, score

MESSAGE_BYTES = 64 << 20
"""Bytes of routes of a replica that are summed and sent at once, on average over the replicas."""


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
    lengths = [example.num_input_tokens for example in examples]
    scored_by = [sorted(chain.from_iterable(each)) for each in worker.plans(examples)]
    own = indices_with_tokens([example.trajectory for example in examples])
    mine = scored_by[groups.data.rank]
    ends = np.cumsum([0, *(lengths[i] for i in mine)]).tolist()
    starts = dict(zip(mine, ends, strict=False))
    places_A = torch.cat([routing.own_part(places) for places in _places(worker, examples, plan, starts)])
    # NCCL cannot sum int16. As every token is recorded once, the sum of its bytes is the route itself.
    values = torch.cat([recording.flatten(1).view(torch.uint8) for recording in recorded])
    axes = [groups.context] if routing.num_parts == 1 else [groups.tensor, groups.context]
    for members in members_of_messages(np.array(lengths) * values.shape[1], MESSAGE_BYTES * groups.data.size):
        scored = [[i for i in each if i in members] for each in scored_by]
        kept = [i for i in own if i in members]
        start, end = (ends[bisect_left(mine, index)] for index in (members.start, members.stop))
        table = torch.zeros(end - start, values.shape[1], dtype=torch.uint8, device=local_device())
        here = (places_A >= start) & (places_A < end)
        table[places_A[here] - start] = values[here]
        sum_over(*axes)(table)
        found = for_own_trajectories(table, scored, kept, lengths, groups.data).cpu().view(routing.dtype)
        parts = found.unflatten(1, (len(routing.layers), -1)).split([lengths[i] for i in kept])
        for index, part in zip(kept, parts, strict=True):
            routes[index] = part.numpy()
    return routes


def _places(
    worker: Worker, examples: Sequence[Example], plan: Sequence[Sequence[int]], starts: Mapping[int, int]
) -> Iterator[torch.Tensor]:
    """Yield for each micro-batch the place of its tokens among the input tokens of this replica, -1 for padding."""
    rule, context = worker.config.padding_rule, worker.groups.context
    for indices in plan:
        members = [examples[i] for i in indices]
        allocated = rule.allocated([example.num_input_tokens for example in members])
        places = np.full(allocated // context.size, -1)
        parts = input_positions(members, rule, context)
        found = [
            np.where(p < examples[i].num_input_tokens, starts[i] + p, -1) for i, p in zip(indices, parts, strict=True)
        ]
        joined = np.concatenate([np.zeros(0, np.int64), *found])
        places[: len(joined)] = joined
        yield torch.from_numpy(places).to(local_device())
