"""Checks of rules that span sections, and of the files that a configuration names. Nothing here changes a value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_bapo.config.algorithm_checks import algorithm_problems, algorithm_warnings
from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.colocation_checks import colocation_problems
from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.config.fp8_checks import transformer_engine_problems
from megatron_bapo.config.idle_keys import idle_key_warnings
from megatron_bapo.config.logging_checks import logging_problems, missing_packages
from megatron_bapo.config.lora_checks import lora_problems
from megatron_bapo.config.lora_warnings import lora_warnings
from megatron_bapo.config.model_checks import model_problems, shape_problems, teacher_problems, teacher_shape_problems
from megatron_bapo.config.reward import FREE_FUNCTION_KEYS, missing_variables
from megatron_bapo.config.rollout import EngineConfig, EngineSizeConfig
from megatron_bapo.config.rollout_checks import rollout_problems, rollout_warnings
from megatron_bapo.config.schema import Config, ParallelConfig
from megatron_bapo.config.section import Section
from megatron_bapo.errors import UserError

PROMPT_FILE_SUFFIXES = (".jsonl", ".parquet")

FREE_ON_RESUME = (
    *("run_dir", "parallel", "weight_sync", "checkpoint", "evaluation", "logging"),
    *("model.transformer_impl", "algorithm.clip_bounds.method", "optimizer.cpu_offload", "rollout.object_store_mib"),
    *(f"trainer.{key}" for key in ("total_steps", "max_tokens_per_gpu", "packing", "share_prompts", "offload")),
    *(f"trainer.{key}" for key in ("skip_zero_advantage", "logprob_chunk_size", "fused_kernels")),
    *("trainer.collective_timeout_s", "trainer.max_restarts"),
    *(f"rollout.{key}" for key in EngineConfig.model_fields if key != "max_response_length"),
    *(f"algorithm.distillation.engines.{key}" for key in EngineSizeConfig.model_fields),
    *("rollout.colocate", "rollout.sleep_level", "rollout.on_weight_update", "rollout.max_reward_failures"),
    *FREE_FUNCTION_KEYS,
)
"""Keys and sections that a continued run may change: those that decide where, how fast and for how long it runs and
what it writes, but not those that change its data or its optimization."""


def check_config(config: Config) -> list[str]:
    """Check every rule and return warnings, one line each, about settings that are allowed but probably unintended.

    Raises UserError that lists all broken rules.
    """
    missing = chain(_missing_prompt_files(config), missing_variables(config.reward), missing_packages(config))
    return _checked(config, chain(missing, model_problems(config), teacher_problems(config)))


def check_planned(
    config: Config, architecture: Architecture, where: str, teacher: Architecture | None = None
) -> list[str]:
    """Check a run that will start on another machine: like `check_config`, but without the rules about files.

    `where` names the source of the architecture in messages.
    """
    return _checked(config, _planned_shape_problems(config, architecture, where, teacher))


def planned_problems(
    config: Config, architecture: Architecture, where: str, teacher: Architecture | None = None
) -> list[str]:
    """Return the broken rules that `check_planned` would raise."""
    return [*rule_problems(config), *_planned_shape_problems(config, architecture, where, teacher)]


def _planned_shape_problems(
    config: Config, architecture: Architecture, where: str, teacher: Architecture | None
) -> Iterator[str]:
    yield from shape_problems(config, architecture, where)
    if teacher is not None:
        yield from teacher_shape_problems(config, teacher, "the teacher", architecture)


def refuse(problems: Iterable[str]) -> None:
    """Raise UserError that lists the problems, if there are any."""
    if lines := [f"  {problem}" for problem in problems]:
        raise UserError("\n".join(["the configuration breaks these rules:", *lines]))


def rule_problems(config: Config) -> Iterator[str]:
    """Yield every broken rule that needs neither files nor the model, one line each."""
    rules = (
        *(_layout_problems, _optimizer_problems, _batch_problems, rollout_problems),
        *(algorithm_problems, _data_problems, logging_problems, colocation_problems, transformer_engine_problems),
        lora_problems,
    )
    return chain.from_iterable(rule(config) for rule in rules)


def _checked(config: Config, more_problems: Iterable[str]) -> list[str]:
    refuse(chain(rule_problems(config), more_problems))
    warnings = (_clip_bounds_warnings, algorithm_warnings, rollout_warnings, _other_warnings, lora_warnings)
    return list(chain.from_iterable(warning(config) for warning in (*warnings, idle_key_warnings)))


def resume_conflicts(old: Config, new: Config) -> list[str]:
    """Return the differences, one line each, for which a run cannot continue with a new configuration.

    Keys in `FREE_ON_RESUME` may differ.
    """
    conflicts = differences(old, new, free=FREE_ON_RESUME)
    style, num_decay = new.optimizer.lr_decay_style, new.optimizer.lr_decay_steps
    if (
        style not in ("constant", "inverse-square-root")
        and num_decay is None
        and old.trainer.total_steps != new.trainer.total_steps
    ):
        conflicts.append(
            f"trainer.total_steps: {old.trainer.total_steps} in the run directory, {new.trainer.total_steps} now; "
            f"this would change the {style} learning-rate schedule, which ends with the run unless it was started with "
            "optimizer.lr_decay_steps; set trainer.total_steps back"
        )
    return conflicts


def differences(old: Section, new: Section, free: Sequence[str]) -> list[str]:
    """Return the differences between saved and current settings, one line each, except in the `free` keys."""
    return list(_differences("", old.model_dump(mode="json"), new.model_dump(mode="json"), free))


def _differences(key: str, old: Any, new: Any, free: Sequence[str]) -> Iterator[str]:
    if key in free or old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old | new:
            yield from _differences(f"{key}.{name}" if key else name, old.get(name), new.get(name), free)
    else:
        yield f"{key}: {json.dumps(old)} in the run directory, {json.dumps(new)} now"


def _layout_problems(config: Config) -> Iterator[str]:
    parallel, trainer = config.parallel, config.trainer
    yield from _setting_problems(parallel)
    grid = list(_grid_problems(parallel))
    yield from grid
    if grid:
        return
    dp = parallel.data_parallel_size
    sizes = {"trainer.ppo_mini_batch_size": trainer.ppo_mini_batch_size}
    if config.warm_start is not None:
        sizes["warm_start.batch_size"] = config.warm_start.batch_size
    for key, size in sizes.items():
        if size < dp:
            yield (
                f"{key}={size} trajectories must be at least one for each of the {dp} data-parallel ranks "
                f"(parallel.world_size={parallel.world_size} / {parallel.model_parallel_size}); set it to {dp} or "
                "more, or lower world_size"
            )


def _setting_problems(parallel: ParallelConfig) -> Iterator[str]:
    """Yield settings of the layout that require another one."""
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        yield (
            "parallel.sequence_parallel=true splits sequences over tensor-parallel ranks, but "
            "parallel.tensor_model_parallel_size=1; set sequence_parallel=false or raise tensor_model_parallel_size"
        )
    vpp = parallel.virtual_pipeline_model_parallel_size
    if vpp > 1 and parallel.pipeline_model_parallel_size == 1:
        yield (
            f"parallel.virtual_pipeline_model_parallel_size={vpp} interleaves the chunks of several stages, but "
            "parallel.pipeline_model_parallel_size=1; set it to 1 or raise pipeline_model_parallel_size"
        )


def _grid_problems(parallel: ParallelConfig) -> Iterator[str]:
    """Check that the ranks form a grid, and those of each pipeline stage a second one for its experts."""
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    world, size = parallel.world_size, parallel.model_parallel_size
    if world % size:
        yield (
            f"parallel.world_size={world} must be a multiple of tensor_model_parallel_size={tp} x "
            f"pipeline_model_parallel_size={pp} x context_parallel_size={cp} = {size}; set parallel.world_size to "
            f"{_multiples(world, size)}"
        )
        return
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    if (world // pp) % (etp * ep):
        yield (
            f"the {world // pp} ranks of a pipeline stage (parallel.world_size={world} / pipeline_model_parallel_size="
            f"{pp}) must be a multiple of expert_tensor_parallel_size={etp} x expert_model_parallel_size={ep} = "
            f"{etp * ep}, over which its experts are split; lower one of these or set parallel.world_size to "
            f"{_multiples(world, math.lcm(etp * ep * pp, size))}"
        )


def _optimizer_problems(config: Config) -> Iterator[str]:
    parallel, optimizer = config.parallel, config.optimizer
    if optimizer.cpu_offload and not parallel.use_distributed_optimizer:
        yield (
            "optimizer.cpu_offload=true needs parallel.use_distributed_optimizer=true, because Megatron offloads only "
            "the distributed optimizer; set use_distributed_optimizer=true, or cpu_offload=false"
        )
    for key in ("grads_dtype", "moments_dtype"):
        if optimizer.cpu_offload and getattr(optimizer, key) == "bfloat16":
            yield (
                f"optimizer.{key}=bfloat16 with optimizer.cpu_offload=true: the offloaded Adam takes gradients and "
                f"moments in fp32; set {key}=float32, or cpu_offload=false"
            )
    if optimizer.grads_dtype == "bfloat16" and config.model.dtype != "bfloat16":
        yield (
            f"optimizer.grads_dtype=bfloat16 with model.dtype={config.model.dtype}: gradients would be "
            "less precise than the parameters; set model.dtype=bfloat16, or grads_dtype=float32"
        )
    if parallel.overlap_param_gather and not (parallel.use_distributed_optimizer and parallel.overlap_grad_reduce):
        yield (
            "parallel.overlap_param_gather=true needs use_distributed_optimizer=true, whose parameters it gathers, and "
            "overlap_grad_reduce=true, whose buckets it uses; set both, or overlap_param_gather=false"
        )


def _batch_problems(config: Config) -> Iterator[str]:
    trainer, n = config.trainer, config.rollout.n
    batch, mini_batch = trainer.train_batch_size, trainer.ppo_mini_batch_size
    fitting = _multiples(batch, math.lcm(n, mini_batch))
    if batch % n:
        yield (
            f"trainer.train_batch_size={batch} counts trajectories and must be a multiple of rollout.n={n}, the number "
            f"of trajectories per prompt; set it to {fitting}"
        )
    if batch % mini_batch:
        yield (
            f"trainer.train_batch_size={batch} trajectories must split evenly into minibatches of "
            f"trainer.ppo_mini_batch_size={mini_batch}; set train_batch_size to {fitting}"
        )
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    longest, cp = config.padding_rule.allocated([prompt + response]), config.parallel.context_parallel_size
    if config.max_micro_batch_tokens < longest:
        padded = f", {longest} with the layout's padding" if longest > prompt + response else ""
        shared = f" x parallel.context_parallel_size={cp}" if cp > 1 else ""
        yield (
            f"trainer.max_tokens_per_gpu={trainer.max_tokens_per_gpu}{shared} must hold the longest trajectory: "
            f"data.max_prompt_length={prompt} + rollout.max_response_length={response} = {prompt + response}{padded}; "
            f"raise max_tokens_per_gpu to at least {-(-longest // cp)}, or shorten the two"
        )


def _multiples(value: int, of: int) -> str:
    """Return, as text, the nearest multiples below and above a value that is not one."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def _data_problems(config: Config) -> Iterator[str]:
    train, validation = config.data.train, config.data.validation
    for key, source in _prompt_sources(config).items():
        yield from prompt_source_problems(key, source, config.reward.type)
    if validation is None and config.evaluation.every_steps:
        yield (
            f"evaluation.every_steps={config.evaluation.every_steps} needs held-out prompts, but data.validation is "
            "not set; set it, or set evaluation.every_steps=0"
        )
    if validation is not None and _origin(train) == _origin(validation):
        yield (
            f"data.train and data.validation are the same prompts ({_origin(train)}), but held-out prompts are "
            "excluded from training; give validation its own file, or another seed"
        )
    if config.warm_start is not None and config.warm_start.demonstration is not None and config.environment is None:
        yield (
            f"warm_start.demonstration={config.warm_start.demonstration} demonstrates replies of an environment, but "
            "environment is not set; set it, or remove warm_start.demonstration"
        )


def prompt_source_problems(key: str, source: PromptSourceConfig, reward_type: str) -> Iterator[str]:
    """Yield the broken rules of one source of prompts, whose configuration key is `key`."""
    if reward_type == "reasoning_gym" and source.reasoning_gym is None:
        yield (
            f"reward.type=reasoning_gym scores only reasoning-gym tasks, but {key}.path={source.path} is a file; set "
            f"{key}.reasoning_gym, or reward.type=math_verify or function"
        )
    if source.path is not None and source.path.suffix not in PROMPT_FILE_SUFFIXES:
        yield f"{key}.path={source.path} must end in {' or '.join(PROMPT_FILE_SUFFIXES)}; convert it to one of them"


def missing_prompt_file(key: str, source: PromptSourceConfig) -> Iterator[str]:
    """Yield what to do if the file of a source, whose configuration key is `key`, does not exist."""
    if source.path is not None and source.path.suffix in PROMPT_FILE_SUFFIXES and not source.path.is_file():
        yield (
            f"{key}.path={source.path} must be an existing file; relative paths start at {Path.cwd()}. "
            "docs/guides/data.md says how to make one"
        )


def _missing_prompt_files(config: Config) -> Iterator[str]:
    for key, source in _prompt_sources(config).items():
        yield from missing_prompt_file(key, source)
    curriculum = config.data.curriculum
    if curriculum is not None and curriculum.pass_rates is not None and not curriculum.pass_rates.is_file():
        yield (
            f"data.curriculum.pass_rates={curriculum.pass_rates} must be an existing file; relative paths start at "
            f"{Path.cwd()}"
        )


def _prompt_sources(config: Config) -> dict[str, PromptSourceConfig]:
    train, validation = config.data.train, config.data.validation
    return {"data.train": train} | ({"data.validation": validation} if validation is not None else {})


def _origin(source: PromptSourceConfig) -> str:
    if source.path is not None:
        return str(source.path)
    return f"reasoning_gym {', '.join(sorted(source.reasoning_gym or {}))} with seed {source.seed}"


def _clip_bounds_warnings(config: Config) -> Iterator[str]:
    """Warn about clip bounds that can never move (arXiv 2510.18927, Algorithm 1).

    Sums are decimal, as the settings are written.
    """
    bounds, section = config.algorithm.clip_bounds, "algorithm.clip_bounds"
    if config.algorithm.objective != "bapo":
        return
    if bounds.positive_contribution_target == 0.0:
        yield (
            f"{section}.positive_contribution_target=0 is met by every minibatch, so the bounds never move. Raise it, "
            "or set algorithm.objective=ppo for fixed bounds"
        )
        return
    if bounds.search_order == "lower_first":
        if (bounds.ratio_lower_start, bounds.ratio_upper_start) == (bounds.ratio_lower_max, bounds.ratio_upper_max):
            yield (
                f"{section}: ratio_lower_start=ratio_lower_max={bounds.ratio_lower_max} and ratio_upper_start="
                f"ratio_upper_max={bounds.ratio_upper_max}, so the bounds never move. Widen one range, or set "
                "algorithm.objective=ppo for fixed bounds"
            )
        return
    low, low_step, low_max, high, high_step, high_max = (
        Decimal(str(value))
        for value in (
            bounds.ratio_lower_start,
            bounds.ratio_lower_step,
            bounds.ratio_lower_max,
            bounds.ratio_upper_start,
            bounds.ratio_upper_step,
            bounds.ratio_upper_max,
        )
    )
    if low + low_step > low_max:
        yield (
            f"{section}: ratio_lower_start={low} + ratio_lower_step={low_step} exceeds ratio_lower_max={low_max}. "
            "Algorithm 1 then ends before it moves the upper bound, so the bounds never move. Raise ratio_lower_max, "
            "lower ratio_lower_step, or set algorithm.objective=ppo for fixed bounds"
        )
    elif high + high_step > high_max:
        yield (
            f"{section}: ratio_upper_start={high} + ratio_upper_step={high_step} exceeds ratio_upper_max={high_max}, "
            "so the upper bound, which alone can raise the positive share, never moves. Raise ratio_upper_max or lower "
            "ratio_upper_step"
        )


def _other_warnings(config: Config) -> Iterator[str]:
    trainer, warmup = config.trainer, config.optimizer.lr_warmup_steps
    num_updates = trainer.total_steps * trainer.updates_per_step
    if 0 < num_updates <= warmup:
        yield (
            f"optimizer.lr_warmup_steps={warmup} is not less than the run's {num_updates} updates, so the learning "
            f"rate never reaches optimizer.lr={config.optimizer.lr}. Lower lr_warmup_steps or train longer"
        )
    num_decay, num_wsd = config.optimizer.lr_decay_steps or num_updates, config.optimizer.lr_wsd_decay_steps or 0
    if num_wsd and warmup + num_wsd > num_decay:
        yield (
            f"optimizer.lr_warmup_steps={warmup} + lr_wsd_decay_steps={num_wsd} exceed the {num_decay} updates of the "
            "schedule, so the learning rate drops as soon as the warm-up ends. Lower one of the two"
        )
    yield from _probe_warnings(config)


def _probe_warnings(config: Config) -> Iterator[str]:
    """Warn about a tolerance below the rounding differences, which the probe would take for wrong weights."""
    tolerance, noise = config.weight_sync.probe_tolerance, config.log_prob_noise
    if tolerance is not None and tolerance < noise:
        precisions = {
            f"fp8.recipe={config.fp8.recipe if config.fp8 else None}": config.fp8 is not None,
            f"rollout.quantization={config.rollout.quantization}": config.rollout.quantization is not None,
            f"rollout.kv_cache_dtype={config.rollout.kv_cache_dtype}": config.rollout.kv_cache_dtype != "auto",
        }
        causes = [name for name, holds in precisions.items() if holds] or [f"model.dtype={config.model.dtype}"]
        yield (
            f"weight_sync.probe_tolerance={tolerance} is less than the {noise} nats by which the log-probs of "
            f"engine and trainer may differ with {' and '.join(causes)}, so the probe may end the run. Remove "
            f"probe_tolerance, or set it to {noise} or more"
        )
