"""Warnings about keys that are set but have no effect because of another key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.config.section import Section


class _Condition(NamedTuple):
    """A condition under which keys have an effect."""

    keys: tuple[str, ...]
    """Keys, or sections with all their keys."""
    holds: Callable[[Config], bool]
    requirement: str
    """The condition as the warning names it."""


def _prompt_source_conditions(name: str) -> Iterator[_Condition]:
    def source(config: Config) -> PromptSourceConfig | None:
        return getattr(config.data, name)

    file_keys = tuple(f"data.{name}.{key}" for key in ("prompt_key", "label_key", "on_bad_line"))
    yield _Condition(file_keys, lambda c: (s := source(c)) is None or s.path is not None, f"data.{name}.path")
    yield _Condition(
        (f"data.{name}.seed",),
        lambda c: (s := source(c)) is None or s.reasoning_gym is not None,
        f"data.{name}.reasoning_gym",
    )


_CONDITIONS = (
    _Condition(("algorithm.clip_bounds",), lambda c: c.algorithm.objective == "bapo", "algorithm.objective=bapo"),
    _Condition(
        ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
        lambda c: c.algorithm.objective in ("ppo", "gspo", "cispo", "function"),
        "algorithm.objective=ppo, gspo, cispo or function (BAPO's bounds are algorithm.clip_bounds)",
    ),
    _Condition(
        ("algorithm.adv_estimator", "algorithm.norm_adv_by_std", "algorithm.min_positive_loss_share"),
        lambda c: c.algorithm.objective != "distill",
        "an algorithm.objective that uses rewards (distill does not)",
    ),
    _Condition(
        ("algorithm.norm_adv_by_std",),
        lambda c: c.algorithm.adv_estimator == "grpo",
        "algorithm.adv_estimator=grpo",
    ),
    _Condition(
        ("algorithm.tau_pos", "algorithm.tau_neg"),
        lambda c: c.algorithm.objective == "sapo",
        "algorithm.objective=sapo",
    ),
    _Condition(
        ("algorithm.kl_loss_type", "algorithm.kl_loss_unbiased"),
        lambda c: c.algorithm.kl_loss_coef > 0.0,
        "algorithm.kl_loss_coef",
    ),
    _Condition(("algorithm.kl_reward_type",), lambda c: c.algorithm.kl_reward_coef > 0.0, "algorithm.kl_reward_coef"),
    _Condition(
        ("algorithm.rollout_correction.rollout_is_threshold",),
        lambda c: c.algorithm.rollout_correction.rollout_is is not None,
        "rollout_is",
    ),
    _Condition(
        (
            "algorithm.rollout_correction.rollout_rs_threshold",
            "algorithm.rollout_correction.rollout_rs_threshold_lower",
        ),
        lambda c: c.algorithm.rollout_correction.rollout_rs is not None,
        "rollout_rs",
    ),
    _Condition(
        ("algorithm.overlong.penalty_factor",),
        lambda c: c.algorithm.overlong.mode == "penalty",
        "overlong.mode=penalty",
    ),
    _Condition(
        ("data.curriculum.min_pass_rate", "data.curriculum.max_pass_rate"),
        lambda c: c.data.curriculum is not None and c.data.curriculum.weighting == "band",
        "data.curriculum.weighting=band",
    ),
    _Condition(("data.chat_template_kwargs",), lambda c: c.data.chat_template, "data.chat_template=true"),
    _Condition(("reward.sandbox", "reward.max_tests"), lambda c: c.reward.type == "code", "reward.type=code"),
    _Condition(
        ("environment.sandbox",),
        lambda c: c.environment is None or c.environment.type == "python",
        "environment.type=python",
    ),
    _Condition(("weight_sync.lora",), lambda c: c.model.lora is not None, "model.lora"),
    _Condition(("evaluation",), lambda c: c.data.validation is not None, "data.validation"),
    _Condition(
        ("rollout.filter_groups.max_num_gen_batches",),
        lambda c: c.rollout.filter_groups.enable,
        "rollout.filter_groups.enable=true",
    ),
    _Condition(
        ("rollout.max_staleness",),
        lambda c: c.rollout.max_staleness <= 1 or c.rollout.may_be_stale,
        "rollout.mode=async, or partial_rollout.over_sampling or max_reuse above 1",
    ),
    _Condition(
        ("rollout.on_stale",),
        lambda c: c.rollout.may_be_stale,
        "rollout.mode=async, or partial_rollout.over_sampling or max_reuse above 1",
    ),
    _Condition(
        ("trainer.share_prompts",),
        lambda c: c.shares_prompts or not c.trainer.share_prompts,
        "layers with transformer_impl=local, packing, no context parallelism, FP8 or routing replay",
    ),
    _Condition(
        ("parallel.recompute_modules",),
        lambda c: c.parallel.recompute_granularity == "selective",
        "parallel.recompute_granularity=selective",
    ),
    _Condition(
        ("parallel.ddp_bucket_size",),
        lambda c: c.parallel.overlap_grad_reduce,
        "parallel.overlap_grad_reduce=true",
    ),
    _Condition(
        ("parallel.pipeline_model_parallel_layout",),
        lambda c: c.parallel.pipeline_model_parallel_size > 1,
        "parallel.pipeline_model_parallel_size of 2 or more",
    ),
    _Condition(
        ("parallel.cp_comm_type",),
        lambda c: c.parallel.context_parallel_size > 1,
        "parallel.context_parallel_size of 2 or more",
    ),
    _Condition(
        ("optimizer.min_lr",),
        lambda c: c.optimizer.lr_decay_style != "constant",
        "optimizer.lr_decay_style other than constant",
    ),
    _Condition(
        ("optimizer.lr_wsd_decay_style",),
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "optimizer.lr_decay_style=WSD",
    ),
    _Condition(
        ("logging.profile_steps",),
        lambda c: max(c.logging.profile_steps, default=0) <= c.trainer.total_steps,
        "trainer.total_steps at least as high as its last step",
    ),
    _Condition(
        ("logging.memory_snapshot_step",),
        lambda c: (c.logging.memory_snapshot_step or 0) <= c.trainer.total_steps,
        "trainer.total_steps at least as high",
    ),
    _Condition(("logging.profile_ranks",), lambda c: bool(c.logging.profile_steps), "logging.profile_steps"),
    *_prompt_source_conditions("train"),
    *_prompt_source_conditions("validation"),
)


def idle_key_warnings(config: Config) -> Iterator[str]:
    """Yield one line for each condition that does not hold, with its keys that are set to other than default values."""
    given = dict(_given("", config))
    for keys, holds, requirement in _CONDITIONS:
        if not holds(config):
            idle = {key: value for key, value in given.items() if f"{key}.".startswith(tuple(f"{k}." for k in keys))}
            if idle:
                listed = ", ".join(f"{key}={_shown(value)}" for key, value in idle.items())
                verb, pronoun = ("has", "it") if len(idle) == 1 else ("have", "them")
                yield f"{listed} {verb} no effect without {requirement}; set that, or remove {pronoun}"


def _given(prefix: str, section: Section) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys, with their values, that are set to other than default values."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name not in section.model_fields_set:
            continue
        if isinstance(value, Section):
            yield from _given(f"{prefix}{name}.", value)
        elif value != field.get_default(call_default_factory=True):
            yield f"{prefix}{name}", value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)
