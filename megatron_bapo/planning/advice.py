"""Find the smallest change with which a configuration fits, and what to improve in one that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_bapo.config.checks import planned_problems
from megatron_bapo.config.padding import round_up
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.generation_time import longest_request_seconds
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.plan import Plan, gib
from megatron_bapo.planning.search import TOKEN_ROUNDING, broken_rules, limited_engine, nearest, search
from megatron_bapo.planning.settings import Settings, with_settings

LESS_HOST_MEMORY = {
    "offloaded state": "more GPUs share it, or hold it without optimizer.cpu_offload and trainer.offload",
    "checkpoint copies": "checkpoint.async_save=false does without them",
    "sleeping weights": "engines on GPUs of their own (--placement separate) do not sleep",
    "processes": "use fewer GPUs of each node",
    "recorded routes": "smaller rollout batches have fewer",
}
"""What reduces each part of `Plan.hosts` but the weight store."""


def advice(plan: Plan) -> Plan | None:
    """Return the plan with the smallest change with which it fits on its GPUs; None if no layout of the search does."""
    for settings in _with_waiting_saves(plan.config, _small_changes(plan)):
        candidate = limited_engine(replace(plan, config=with_settings(plan.config, settings)))
        teacher = teacher_of(candidate.config)
        if candidate.fits and not planned_problems(candidate.config, candidate.architecture, "the model", teacher):
            return candidate
    return next(iter(search(plan, plan.num_gpus)), None)


def obstacles(plan: Plan, num_gpus: int) -> tuple[Plan | None, list[str]]:
    """Return the layout that comes nearest to fitting where none does, and its problems with the ways out."""
    teachers = plan.config.num_teacher_ranks
    if num_gpus <= teachers:
        return None, [
            f"algorithm.distillation.engines takes {teachers} of --num-gpus={num_gpus}, which leaves no GPU for the "
            "trainer; raise --num-gpus, or lower the engines' num_engines or tensor_parallel_size"
        ]
    near = nearest(plan, num_gpus)
    if near is None:
        own = num_gpus - teachers
        none = f"no sizes of the axes that divide {own} GPUs keep the rules; take another number of GPUs"
        return None, [none, *broken_rules(plan, num_gpus)]
    lines = [*near.problems]
    if near.problems_of_gpus:
        lines.append("Take more or larger GPUs, or shorter responses.")
    for host in near.hosts:
        if host.is_exceeded:
            part = max(host.parts, key=host.parts.__getitem__)
            lines.append(
                "Take nodes with more host memory (--host-gib says how much they have). Its largest part there is "
                f"{gib(host.parts[part])} of {part}; {LESS_HOST_MEMORY.get(part) or _without_store(near)}."
            )
    return near, lines


def plan_warnings(plan: Plan) -> list[str]:
    """Return what a run would do that its user may not want, although it fits."""
    return [*_idle_gpus(plan), *_slow_requests(plan)]


def _idle_gpus(plan: Plan) -> Iterator[str]:
    rollout, world = plan.config.rollout, plan.config.parallel.world_size
    used, each = plan.num_engine_gpus, rollout.ranks_per_engine
    if plan.placement == "colocated" and used + each <= world:
        yield (
            f"rollout.num_engines={rollout.num_engines} engines of {each} GPUs use {used} of the trainer's {world} "
            f"GPUs while responses are generated. Set it to {world // each} to use all"
        )


def _slow_requests(plan: Plan) -> Iterator[str]:
    """Warn about a limit that requests may exceed; generation may take twice as long as estimated."""
    parts = plan.config, plan.architecture, plan.engine_gpu, plan.engine, plan.assumptions.of_engine_nodes
    seconds, limit_s = longest_request_seconds(*parts), plan.config.rollout.request_limit_s
    if 2.0 * seconds > limit_s:
        yield (
            f"rollout.request_timeout_s={limit_s:.0f} fails requests that take longer, and the longest one on a "
            f"full engine is estimated to take {seconds:.0f} s. Set it to {2.0 * seconds:.0f} or more"
        )


def _without_store(plan: Plan) -> str:
    """Return the transports that need no weight store, as the plan's placement and number of nodes allow."""
    if plan.placement == "separate":
        return "it is not needed with weight_sync.transport=nccl"
    on_one_node = "weight_sync.transport=cuda_ipc, or " if plan.num_nodes == 1 else ""
    return f"it is not needed with {on_one_node}rollout.colocate=false and weight_sync.transport=nccl"


def _with_waiting_saves(config: Config, small_changes: Iterator[Settings]) -> Iterator[Settings]:
    """Yield each change, then with checkpoints that training waits for, which need no copy in host memory."""
    for settings in small_changes:
        yield settings
        if config.checkpoint.async_save:
            yield settings | {"checkpoint": {"async_save": False}}


def _small_changes(plan: Plan) -> Iterator[Settings]:
    """Yield small changes, starting with none: then only the memory of a colocated engine is reduced."""
    parallel, longest = plan.config.parallel, plan.config.max_sequence_length
    needed = round_up(-(-longest // parallel.context_parallel_size), TOKEN_ROUNDING)
    shorter: Settings = {"trainer": {"max_tokens_per_gpu": min(needed, plan.config.trainer.max_tokens_per_gpu)}}
    recompute: Settings = {"parallel": {"recompute_granularity": "full"}}
    spread: Settings = {"parallel": {"use_distributed_optimizer": True}}
    offload: Settings = {"parallel": {"use_distributed_optimizer": True}, "optimizer": {"cpu_offload": True}}
    turns: Settings = {"rollout": {"sleep_level": 2}, "trainer": {"offload": True}}
    yield {}
    if plan.placement == "colocated":
        yield from ({"rollout": turns["rollout"]}, turns)
    yield from (spread, shorter, recompute, shorter | recompute, offload)
    yield {**shorter, "parallel": recompute["parallel"] | offload["parallel"], "optimizer": offload["optimizer"]}
