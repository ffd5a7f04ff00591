"""Search for the layouts of a model that fit on a number of GPUs, best first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from megatron_bapo.config.checks import planned_problems, refuse
from megatron_bapo.config.model_checks import split_problems
from megatron_bapo.config.padding import round_up
from megatron_bapo.config.schema import Config
from megatron_bapo.config.section import Section
from megatron_bapo.planning.hardware import GIB
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.plan import Plan

SIZES = (1, 2, 4, 8)
EXPERT_SIZES = (1, 2, 4, 8, 16, 32)
VIRTUAL_SIZES = (1, 2, 4)
RECOMPUTE = (None, "selective", "full")
"""`selective` recomputes the MLPs or experts, whose activations are the largest; FlashAttention recomputes its own."""
TOKEN_ROUNDING = 1024
TRAINER_SHARES = (0.25, 0.5, 0.75)
"""Shares of the GPUs that the trainer gets when the engines have GPUs of their own."""
LOWEST_UTILIZATION = 0.1
"""Smallest rollout.gpu_memory_utilization that is proposed."""
NEAR_BEST = 0.02
"""Step times this close to the best are taken for equal: the estimate is not more precise."""


def search(plan: Plan, num_gpus: int) -> list[Plan]:
    """Return every layout of the trainer and its engines that fits beside the teacher's engines, if it has any.

    The model, the batch, the lengths and the teacher's engines are kept.

    Layouts whose estimated step time is within `NEAR_BEST` of the best come first: those that leave more GPU memory
    free while training before others, and at equal memory those with fewer parallel dimensions. The rest follows by
    step time.
    """
    found = sorted(_fitting(plan, num_gpus - plan.config.num_teacher_ranks), key=lambda candidate: candidate.time.total)
    num_near = sum(candidate.time.total <= (1 + NEAR_BEST) * found[0].time.total for candidate in found)
    return [*sorted(found[:num_near], key=_preference), *found[num_near:]]


def _preference(plan: Plan) -> tuple[int, int]:
    """Return the order of equally fast layouts: whole GiB on the fullest GPU, then parallel dimensions above 1."""
    parallel = plan.config.parallel
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
    )
    return round(plan.while_training(plan.worst_stage) / GIB), sum(size > 1 for size in sizes)


def check_searched(plan: Plan, num_gpus: int) -> None:
    """Raise UserError with the rules that every layout of a search breaks; no number of GPUs would help."""
    broken = [
        planned_problems(with_settings(plan.config, settings), plan.architecture, "the model", teacher_of(plan.config))
        for settings in _layouts(plan, num_gpus)
    ]
    refuse(problem for problem in (broken[0] if broken else []) if all(problem in each for each in broken))


def changes(old: Config, new: Config) -> list[str]:
    """Return the overrides that turn one configuration into another."""
    return list(_changes("", old, new))


def with_settings(config: Config, settings: dict[str, dict[str, Any]]) -> Config:
    """Return the configuration with some keys of some sections replaced, validated again."""
    sections = {
        name: getattr(config, name).__class__.model_validate(getattr(config, name).model_dump() | values)
        for name, values in settings.items()
    }
    return config.model_copy(update=sections)


def largest_engine(plan: Plan) -> Plan:
    """Return the plan with a colocated engine limited to the memory that the trainer leaves, if more is configured."""
    if plan.placement == "separate":
        return plan
    taken = plan.while_generating(plan.fullest_resident_stage) - plan.engine.total
    free = int(100 * (plan.gpu_bytes - taken) / plan.gpu_bytes) / 100
    if free >= plan.config.rollout.gpu_memory_utilization or free < LOWEST_UTILIZATION:
        return plan
    return _with_same_trainer(plan, {"rollout": {"gpu_memory_utilization": free, "kv_cache_gib": None}})


def _fitting(plan: Plan, num_gpus: int) -> Iterator[Plan]:
    for settings in _layouts(plan, num_gpus):
        config = with_settings(plan.config, settings)
        if planned_problems(config, plan.architecture, "the model", teacher_of(config)):
            continue
        trainer = replace(plan, config=config)
        if trainer.while_training(trainer.worst_stage) > trainer.gpu_bytes:
            continue
        engines = [largest_engine(candidate) for candidate in _engines(trainer, num_gpus)]
        fitting = [candidate for candidate in engines if candidate.fits]
        if not fitting and config.checkpoint.async_save:  # whose copy needs host memory
            waiting = [_with_same_trainer(each, {"checkpoint": {"async_save": False}}) for each in engines]
            fitting = [candidate for candidate in waiting if candidate.fits]
        if fitting:
            yield min(fitting, key=lambda candidate: candidate.time.generation)


def _layouts(plan: Plan, num_gpus: int) -> Iterator[dict[str, dict[str, Any]]]:
    config, has_experts = plan.config, bool(plan.architecture.moe_layers)
    modules = ("mlp",) * plan.architecture.has_dense_layers + ("moe",) * has_experts
    worlds = [num_gpus] if plan.placement == "colocated" else [int(num_gpus * share) for share in TRAINER_SHARES]
    expert_sizes = EXPERT_SIZES if has_experts else (1,)
    for world, tp, pp, vpp, cp, ep, granularity, offload in product(
        worlds, SIZES, SIZES, VIRTUAL_SIZES, SIZES, expert_sizes, RECOMPUTE, (False, True)
    ):
        if world < 1 or world % (tp * pp * cp) or (vpp > 1 and pp == 1):
            continue
        parallel = {
            "world_size": world,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "pipeline_model_parallel_layout": "auto" if plan.architecture.num_hidden_layers % pp else None,
            "context_parallel_size": cp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1 if ep > 1 else None,
            "sequence_parallel": tp > 1,
            "use_distributed_optimizer": True,
            "recompute_granularity": granularity,
        }
        if granularity == "selective":
            parallel["recompute_modules"] = modules
        needed = round_up(-(-config.max_model_len // cp), TOKEN_ROUNDING)
        for budget in {needed, max(needed, config.trainer.max_tokens_per_gpu)}:
            yield {
                "parallel": parallel,
                "trainer": {"max_tokens_per_gpu": budget},
                "optimizer": {"cpu_offload": offload},
            }


def _engines(plan: Plan, num_gpus: int) -> Iterator[Plan]:
    world = plan.config.parallel.world_size
    available = num_gpus if plan.placement == "colocated" else num_gpus - world
    num_stages = plan.config.rollout.pipeline_parallel_size
    for size in SIZES:
        splits = not any(split_problems(plan.architecture, "", "", size))
        num_ranks = size * num_stages
        if available % num_ranks == 0 and splits:
            num_nodes = -(-num_ranks // plan.assumptions.gpus_per_node)
            sizes = {"tensor_parallel_size": size, "num_engines": available // num_ranks, "nodes_per_engine": num_nodes}
            yield _with_same_trainer(plan, {"rollout": sizes})


def _with_same_trainer(plan: Plan, settings: dict[str, dict[str, Any]]) -> Plan:
    changed = replace(plan, config=with_settings(plan.config, settings))
    vars(changed)["stages"] = plan.stages  # the trainer's memory is unchanged, and takes the longest to compute
    return changed


def _changes(prefix: str, old: Section, new: Section) -> Iterator[str]:
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, Section) and isinstance(after, Section):
            yield from _changes(f"{prefix}{name}.", before, after)
        else:
            yield f"{prefix}{name}={_written(after)}"


def _written(value: Any) -> str:
    """Return the value as YAML on the command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(value, default=str).strip('"')
