"""Search for the layouts of a model that fit on a number of GPUs, best first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

from megatron_bapo.config.checks import planned_problems, refuse, rule_problems
from megatron_bapo.config.model_checks import engine_split_problems
from megatron_bapo.config.padding import round_up
from megatron_bapo.planning.hardware import GIB
from megatron_bapo.planning.known_models import teacher_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.settings import Settings, with_settings

SIZES, LARGE_SIZES = (1, 2, 4, 8), (16, 32)
"""GPUs of an engine, by its tensor parallelism; the large sizes are for weights that the others do not hold."""
USUAL_SIZE, USUAL_EXPERT_SIZE = 8, 32
"""Largest sizes of the trainer's axes, and of expert parallelism, that are tried first."""
LARGEST_TENSOR_SIZE = 16
VIRTUAL_SIZES = (1, 2, 4)
RECOMPUTE = (None, "selective", "full")
"""`selective` recomputes the MLPs or experts, whose activations are the largest; FlashAttention recomputes its own."""
TOKEN_ROUNDING = 1024
TRAINER_SHARES = (0.25, 0.5, 0.75)
"""Shares of the GPUs that the trainer gets when the engines have GPUs of their own."""
LOWEST_UTILIZATION = 0.1
"""Smallest rollout.gpu_memory_utilization that is proposed."""
HIGHEST_UTILIZATION = 0.9
"""Largest one, a little below vLLM's default."""
SPARE_MEMORY = 0.05
"""Fraction of a GPU's memory that a colocated engine whose share is raised leaves free: the estimate may be too low."""
MOST_SEQUENCES = 1024
"""Largest rollout.max_num_seqs that is proposed, which is vLLM's default on GPUs with 70 GiB or more."""
NEAR_BEST = 0.02
"""Step times this close to the best are taken for equal: the estimate is not more precise."""


def search(plan: Plan, num_gpus: int) -> list[Plan]:
    """Return every layout of the trainer and its engines that fits beside the teacher's engines, if it has any.

    The model, the batch, the lengths and the teacher's engines are kept. The sizes of the axes are divisors of the
    number of ranks. Those up to `USUAL_SIZE` are tried first, and larger ones only if none of them fits. Colocated
    engines get the memory that the trainer leaves, with `trainer.offload` if that is faster, and may run their part of
    the batch at once.

    Layouts whose estimated step time is within `NEAR_BEST` of the best come first: those that leave more GPU memory
    free while training before others, and at equal memory those with fewer parallel dimensions. The rest follows by
    step time.
    """
    num_own = num_gpus - plan.config.num_teacher_ranks
    fitting = [*_fitting(plan, _layouts(plan, num_own), num_own)] or _fitting(
        plan, _wide_layouts(plan, num_own), num_own
    )
    found = sorted(fitting, key=lambda candidate: candidate.time.total)
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


def nearest(plan: Plan, num_gpus: int) -> Plan | None:
    """Return the layout of the search that comes nearest to fitting; None if every one breaks a rule.

    Of the layouts that take the least GPU memory for training, it is the one whose trainer exceeds the GPUs the least,
    and then the one with the fewest problems and the least host memory.
    """
    num_own, candidates = num_gpus - plan.config.num_teacher_ranks, list[Plan]()
    for settings in chain(_layouts(plan, num_own), _wide_layouts(plan, num_own)):
        if settings["parallel"]["recompute_granularity"] != "full":
            continue
        trainer = _allowed(plan, settings)
        candidates += [] if trainer is None else map(limited_engine, _engines(trainer, num_own))
    return min(candidates, key=_distance, default=None)


def broken_rules(plan: Plan, num_gpus: int) -> list[str]:
    """Return the rules that the search's layout with the fewest data-parallel ranks breaks."""
    num_own = num_gpus - plan.config.num_teacher_ranks
    layouts = chain(_layouts(plan, num_own), _wide_layouts(plan, num_own))
    configs = (with_settings(plan.config, settings) for settings in layouts)
    fewest = min(configs, key=lambda config: config.parallel.data_parallel_size, default=None)
    return [] if fewest is None else planned_problems(fewest, plan.architecture, "the model", teacher_of(fewest))


def _distance(plan: Plan) -> tuple[int, int, int]:
    excess = max(0, plan.while_training(plan.worst_stage) - plan.gpu_bytes)
    return excess, len(plan.problems), plan.host_bytes


def check_searched(plan: Plan, num_gpus: int) -> None:
    """Raise UserError with the rules that every layout of a search breaks; no number of GPUs would help."""
    broken = [
        planned_problems(with_settings(plan.config, settings), plan.architecture, "the model", teacher_of(plan.config))
        for settings in _layouts(plan, num_gpus)
    ]
    refuse(problem for problem in (broken[0] if broken else []) if all(problem in each for each in broken))


def limited_engine(plan: Plan) -> Plan:
    """Return the plan with a colocated engine limited to the memory that the trainer leaves, if more is configured."""
    free = _free_for_engine(plan, spare=0.0)
    if free >= plan.config.rollout.gpu_memory_utilization or free < LOWEST_UTILIZATION:
        return plan
    return _with_same_trainer(plan, {"rollout": {"gpu_memory_utilization": free, "kv_cache_gib": None}})


def _with_offload(plan: Plan) -> Iterator[Plan]:
    """Yield the plan, and one whose colocated trainer leaves the GPUs to the engines while they generate, if it may."""
    yield plan
    if plan.placement == "colocated" and not plan.config.trainer.offload:
        offloading = _with_same_trainer(plan, {"trainer": {"offload": True}})
        if not any(rule_problems(offloading.config)):
            yield offloading


def _largest_engine(plan: Plan) -> Plan:
    """Return the plan with engines that run their responses at once, as far as the memory allows that they may use."""
    rollout, batch = plan.config.rollout, plan.config.trainer.train_batch_size
    together = 1 << (-(-batch // rollout.num_engines) - 1).bit_length()
    values: dict[str, Any] = {"max_num_seqs": max(rollout.max_num_seqs, min(together, MOST_SEQUENCES))}
    free = min(HIGHEST_UTILIZATION, _free_for_engine(plan, SPARE_MEMORY))
    if rollout.kv_cache_gib is None and plan.placement == "colocated" and free > rollout.gpu_memory_utilization:
        values["gpu_memory_utilization"] = free
    return limited_engine(_with_same_trainer(plan, {"rollout": values}))


def _free_for_engine(plan: Plan, spare: float) -> float:
    """Return the share of a GPU's memory that a colocated trainer leaves while engines generate, rounded down."""
    if plan.placement == "separate":
        return 1.0
    taken = plan.while_generating(plan.fullest_resident_stage) - plan.engine.total
    return int(100 * (1.0 - spare - taken / plan.gpu_bytes)) / 100


def _allowed(plan: Plan, settings: Settings) -> Plan | None:
    """Return the plan with these settings, or None if they break a rule."""
    config = with_settings(plan.config, settings)
    broken = planned_problems(config, plan.architecture, "the model", teacher_of(config))
    return None if broken else replace(plan, config=config)


def _fitting(plan: Plan, layouts: Iterator[Settings], num_gpus: int) -> Iterator[Plan]:
    for settings in layouts:
        trainer = _allowed(plan, settings)
        if trainer is None or trainer.while_training(trainer.worst_stage) > trainer.gpu_bytes:
            continue
        config = trainer.config
        engines = [
            _largest_engine(candidate) for each in _with_offload(trainer) for candidate in _engines(each, num_gpus)
        ]
        fitting = [candidate for candidate in engines if candidate.fits and _is_placed(candidate, num_gpus)]
        if not fitting and config.checkpoint.async_save:  # whose copy needs host memory
            waiting = [_with_same_trainer(each, {"checkpoint": {"async_save": False}}) for each in engines]
            fitting = [candidate for candidate in waiting if candidate.fits and _is_placed(candidate, num_gpus)]
        if fitting:
            yield min(fitting, key=lambda candidate: candidate.time.total)


def _is_placed(plan: Plan, num_gpus: int) -> bool:
    """Whether the launcher can place a run on the nodes that have `num_gpus` GPUs beside the teacher's."""
    all_gpus = num_gpus + plan.config.num_teacher_ranks
    return plan.num_nodes <= max(plan.num_filled_nodes, -(-all_gpus // plan.assumptions.gpus_per_node))


def _wide_layouts(plan: Plan, num_gpus: int) -> Iterator[Settings]:
    """Yield the layouts in which an axis is larger than `_layouts` has it."""
    for settings in _layouts(plan, num_gpus, usual=False):
        parallel = settings["parallel"]
        sizes = [parallel[f"{name}_parallel_size"] for name in ("tensor_model", "pipeline_model", "context")]
        if max(sizes) > USUAL_SIZE or parallel["expert_model_parallel_size"] > USUAL_EXPERT_SIZE:
            yield settings


def _layouts(plan: Plan, num_gpus: int, *, usual: bool = True) -> Iterator[Settings]:
    config, arch, has_experts = plan.config, plan.architecture, bool(plan.architecture.moe_layers)
    modules = ("mlp",) * arch.has_dense_layers + ("moe",) * has_experts
    worlds = [num_gpus] if plan.placement == "colocated" else _separate_sizes(num_gpus, plan.assumptions.gpus_per_node)
    most = USUAL_SIZE if usual else num_gpus
    most_tensor, most_experts = (USUAL_SIZE, USUAL_EXPERT_SIZE) if usual else (LARGEST_TENSOR_SIZE, num_gpus)
    for world in worlds:
        tensor_sizes = [size for size in _divisors(world, most_tensor) if arch.num_attention_heads % size == 0]
        stages = _divisors(world, min(most, arch.num_hidden_layers))
        context_sizes = _divisors(world, min(most, max(1, config.max_sequence_length // TOKEN_ROUNDING)))
        expert_sizes = [size for size in _divisors(arch.num_experts, most_experts) if has_experts and world % size == 0]
        axes = product(
            tensor_sizes, stages, VIRTUAL_SIZES, context_sizes, expert_sizes or [1], RECOMPUTE, (False, True)
        )
        yield from _layouts_of(plan, world, modules, axes)


def _separate_sizes(num_gpus: int, per_node: int) -> list[int]:
    """Return numbers of trainer ranks beside engines: shares of the GPUs, also rounded to whole nodes."""
    shares = [int(num_gpus * share) for share in TRAINER_SHARES]
    whole = [round(size / per_node) * per_node for size in shares]
    return sorted({size for size in (*shares, *whole) if 0 < size < num_gpus})


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def _layouts_of(plan: Plan, world: int, modules: tuple[str, ...], axes: Iterable[Any]) -> Iterator[Settings]:
    """Yield the settings of a trainer of `world` ranks with those of the axes' sizes that divide it."""
    config = plan.config
    for tp, pp, vpp, cp, ep, granularity, offload in axes:
        if world % (tp * pp * cp) or (vpp > 1 and pp == 1) or world // pp % ep:
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
        needed = round_up(-(-config.max_sequence_length // cp), TOKEN_ROUNDING)
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
    for size in _engine_sizes(plan):
        num_ranks = size * num_stages
        num_nodes = -(-num_ranks // plan.assumptions.of_engine_nodes.gpus_per_node)
        if available % num_ranks == 0 and num_ranks % num_nodes == 0:
            sizes = {"tensor_parallel_size": size, "num_engines": available // num_ranks, "nodes_per_engine": num_nodes}
            yield _with_same_trainer(plan, {"rollout": sizes})


def _engine_sizes(plan: Plan) -> list[int]:
    """Return the configured tensor-parallel size of engines and those of the search into which the model splits."""

    def split(sizes: Iterable[int]) -> list[int]:
        return [size for size in sizes if not any(engine_split_problems(plan.architecture, "", "", size))]

    usual = split(SIZES)
    largest = _with_same_trainer(plan, {"rollout": {"tensor_parallel_size": usual[-1]}})
    is_held = largest.engine.weights <= HIGHEST_UTILIZATION * plan.engine_gpu_bytes
    return sorted({plan.config.rollout.tensor_parallel_size, *usual, *([] if is_held else split(LARGE_SIZES))})


def _with_same_trainer(plan: Plan, settings: Settings) -> Plan:
    changed = replace(plan, config=with_settings(plan.config, settings))
    # The trainer's memory and time are unchanged, and take the longest to compute.
    vars(changed).update(stages=plan.stages, training=plan.training)
    return changed
