"""The batch arithmetic of a configuration, in trajectories and tokens."""

from __future__ import annotations

from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.config.rollout import EngineSizeConfig
from megatron_bapo.config.schema import Config


def batch_arithmetic(config: Config) -> list[tuple[str, str]]:
    """Return rows (name, explanation) from the layout to the token limits, to print before a run starts.

    The configuration must have passed `check_config`.
    """
    trainer, dp, n = config.trainer, config.parallel.data_parallel_size, config.rollout.n
    steps, batch, mini_batch = trainer.total_steps, trainer.train_batch_size, trainer.ppo_mini_batch_size
    updates = trainer.updates_per_step
    each = f"{mini_batch / dp:,.1f}".removesuffix(".0")
    rows = [
        ("training prompts", _prompts(config.data.train)),
        ("objective", _objective(config)),
        ("trainer", _trainer_layout(config)),
        ("engines", _engines(config)),
        ("each step", f"{config.prompts_per_step:,} prompts x {n} = {batch:,} trajectories"),
        (
            "updates per step",
            f"{_count(trainer.ppo_epochs, 'pass', 'passes')} x {batch:,} / {mini_batch:,} trajectories = {updates:,}",
        ),
        ("each update", f"{mini_batch:,} trajectories = {each} x {_count(dp, 'data-parallel rank')}"),
        (
            "whole run",
            f"{_count(steps, 'step')} x {updates:,} = {steps * updates:,} updates on {steps * batch:,} trajectories",
        ),
        ("rollouts", _rollouts(config)),
        ("behaviour policy", _behaviour_policy(config)),
        ("tokens", _tokens(config)),
        ("held-out samples", _evaluation(config)),
    ]
    if config.warm_start is not None:
        start = config.warm_start
        rows.insert(4, ("warm start", f"{start.num_steps:,} supervised updates of {start.batch_size:,} demonstrations"))
    return rows


def _prompts(source: PromptSourceConfig) -> str:
    origin = str(source.path) if source.reasoning_gym is None else f"reasoning_gym: {', '.join(source.reasoning_gym)}"
    return origin if source.size is None else f"{source.size:,} of {origin}"


def _objective(config: Config) -> str:
    algorithm = config.algorithm
    name = algorithm.function or algorithm.objective
    teacher = algorithm.distillation and algorithm.distillation.teacher
    if name == "distill":
        return f"distill, towards the teacher {teacher}"
    advantages = f"{name}, with advantages by {algorithm.adv_function or algorithm.adv_estimator}"
    return advantages if teacher is None else f"{advantages}, and distillation from the teacher {teacher}"


def _trainer_layout(config: Config) -> str:
    parallel = config.parallel
    cp, ep, vpp = (
        parallel.context_parallel_size,
        parallel.expert_model_parallel_size,
        parallel.virtual_pipeline_model_parallel_size,
    )
    context = f"{cp} context x " if cp > 1 else ""
    text = (
        f"{_count(parallel.world_size, 'process', 'processes')} = {parallel.tensor_model_parallel_size} tensor x "
        f"{context}{parallel.pipeline_model_parallel_size} pipeline x {parallel.data_parallel_size} data parallel"
    )
    more = {
        "sequence parallel": parallel.sequence_parallel,
        f"{vpp} virtual stages per rank": vpp > 1,
        "uneven pipeline stages": parallel.pipeline_model_parallel_layout is not None,
        f"{ep} expert parallel": ep > 1,
    }
    return ", ".join([text, *(name for name, holds in more.items() if holds)])


def _engines(config: Config) -> str:
    teacher = config.algorithm.teacher_engines
    return f"{_engine_sizes(config.rollout)}{f', and {_engine_sizes(teacher)} of the teacher' if teacher else ''}"


def _engine_sizes(engines: EngineSizeConfig) -> str:
    tp, pp = engines.tensor_parallel_size, engines.pipeline_parallel_size
    return f"{engines.num_engines} x {tp} tensor{f' x {pp} pipeline' if pp > 1 else ''} parallel"


def _rollouts(config: Config) -> str:
    rollout, partial = config.rollout, config.rollout.partial_rollout
    when = {"sync": "while the trainer waits", "async": "also while the trainer trains"}[rollout.mode]
    more = {
        f"tokens up to {_count(rollout.max_staleness, 'policy version')} old": rollout.may_be_stale,
        "groups that become too old dropped": rollout.may_be_stale and rollout.on_stale == "drop",
        f"responses in segments of {partial.token_budget} tokens": partial.token_budget is not None,
        f"{partial.over_sampling} prompts in flight per prompt of the batch": partial.over_sampling > 1.0,
        f"each group in up to {rollout.max_reuse} batches": rollout.max_reuse > 1,
        "groups of equal rewards dropped and replaced": rollout.filter_groups.enable,
    }
    return ", ".join([f"{rollout.mode}: {when}", *(name for name, holds in more.items() if holds)])


def _behaviour_policy(config: Config) -> str:
    algorithm = config.algorithm
    if algorithm.behaviour_policy == "rollout":
        return "rollout: ratios are current / rollout log-probs, as the engines report them"
    correction = algorithm.rollout_correction
    levels = {"importance weights": correction.rollout_is, "rejection": correction.rollout_rs}
    corrections = [f"{level} {name}" for name, level in levels.items() if level is not None]
    return (
        "recomputed: ratios are current / proximal log-probs, which the trainer computes once per step; proximal / "
        f"rollout gives {' and '.join(corrections) or 'no correction'}"
    )


def _tokens(config: Config) -> str:
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    budget, cp = config.max_micro_batch_tokens, config.parallel.context_parallel_size
    fitting = budget // config.padding_rule.allocated([prompt + response])
    held = _count(fitting, "such trajectory", "such trajectories")
    return (
        f"{prompt:,} prompt + {response:,} response = {prompt + response:,} at most per trajectory; a micro-batch of "
        f"{budget:,}{f' on {cp} ranks' if cp > 1 else ''} holds {held}, so an update takes at most "
        f"{_count(config.most_micro_batches, 'micro-batch', 'micro-batches')} per rank"
    )


def _evaluation(config: Config) -> str:
    if config.data.validation is None:
        return "none: data.validation is not set"
    every = config.evaluation.every_steps
    regular = f", and every {_count(every, 'step')}" if every else ""
    return f"{config.evaluation.n} per prompt, before the first and after the last step{regular}"


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
