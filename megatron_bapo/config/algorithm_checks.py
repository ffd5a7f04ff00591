"""Rules of the section `algorithm` that span keys or depend on other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.schema import Config


def algorithm_problems(config: Config) -> Iterator[str]:
    """Yield the broken rules, one line each."""
    algorithm, rollout = config.algorithm, config.rollout
    of_groups = algorithm.adv_estimator not in ("reinforce_plus_plus", "function")
    if rollout.n == 1 and of_groups and algorithm.objective != "distill":
        yield (
            f"rollout.n=1 with algorithm.adv_estimator={algorithm.adv_estimator}: advantages compare the rewards of a "
            "group, so they are zero in a group of one; set rollout.n to 2 or more, or "
            "adv_estimator=reinforce_plus_plus"
        )
    if algorithm.rollout_correction.active and algorithm.behaviour_policy == "rollout":
        yield (
            "algorithm.rollout_correction with algorithm.behaviour_policy=rollout: it corrects for the difference "
            "between rollout and recomputed log-probs, but the ratios already use the rollout log-probs; set "
            "behaviour_policy=recomputed, or rollout_is=null and rollout_rs=null"
        )
    if algorithm.routing_replay == "trainer" and algorithm.behaviour_policy == "rollout":
        yield (
            "algorithm.routing_replay=trainer with algorithm.behaviour_policy=rollout: it replays the routes of the "
            "pass that recomputes the log-probs, and there is no such pass; set behaviour_policy=recomputed, or "
            "routing_replay=none"
        )
    if algorithm.routing_replay == "rollout" and rollout.pipeline_parallel_size > 1:
        yield (
            f"algorithm.routing_replay=rollout with rollout.pipeline_parallel_size={rollout.pipeline_parallel_size}: "
            "vLLM returns routes only from engines without pipeline parallelism; set pipeline_parallel_size=1, or "
            "routing_replay=trainer"
        )
    if algorithm.clip_ratio_c is not None and algorithm.objective == "cispo":
        yield (
            f"algorithm.clip_ratio_c={algorithm.clip_ratio_c} has no use with algorithm.objective=cispo, whose weights "
            "are clipped at 1 + clip_ratio_high already; remove clip_ratio_c"
        )
    is_unclipped = algorithm.objective in ("sapo", "function")
    of_ppo = {
        f"algorithm.clip_ratio_c={algorithm.clip_ratio_c}": algorithm.clip_ratio_c is not None and is_unclipped,
        "logging.entropy_clip_rule=true": (
            config.logging.entropy_clip_rule and (is_unclipped or algorithm.objective in ("cispo", "gspo"))
        ),
    }
    for setting, is_given in of_ppo.items():
        if is_given:
            yield (
                f"{setting} is about PPO's clipping of tokens, which algorithm.objective={algorithm.objective} does "
                "not use; remove it"
            )
    yield from _distillation_problems(config)
    yield from _zero_advantage_problems(config)
    buffer_length = algorithm.overlong.buffer_length or 0
    if buffer_length > rollout.max_response_length:
        yield (
            f"algorithm.overlong.buffer_length={buffer_length} must not exceed rollout.max_response_length="
            f"{rollout.max_response_length}, of which it is a part; lower it"
        )
    yield from _truncation_problems(config)


def _distillation_problems(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.objective == "distill":
        if algorithm.distillation is None:
            yield (
                "algorithm.objective=distill needs a teacher; set algorithm.distillation.teacher to the folder of a "
                "Hugging Face checkpoint with the policy's tokenizer"
            )
        without_rewards = {
            f"algorithm.kl_reward_coef={algorithm.kl_reward_coef}": algorithm.kl_reward_coef > 0.0,
            f"algorithm.clip_ratio_c={algorithm.clip_ratio_c}": algorithm.clip_ratio_c is not None,
            f"algorithm.off_policy_mask_threshold={algorithm.off_policy_mask_threshold}": (
                algorithm.off_policy_mask_threshold is not None
            ),
            "algorithm.overlong.mode=penalty": algorithm.overlong.mode == "penalty",
            "rollout.filter_groups.enable=true": config.rollout.filter_groups.enable,
            "logging.entropy_clip_rule=true": config.logging.entropy_clip_rule,
        }
        for setting, is_given in without_rewards.items():
            if is_given:
                yield (
                    f"{setting} acts on advantages that rewards give, which algorithm.objective=distill does not use; "
                    "remove it, or set another objective beside algorithm.distillation"
                )
    elif config.reward.type == "none":
        yield (
            f"reward.type=none with algorithm.objective={algorithm.objective}: it learns from rewards, which would all "
            "be 0; set another reward, or objective=distill"
        )


def _zero_advantage_problems(config: Config) -> Iterator[str]:
    """Refuse to leave out trajectories with advantage 0 where they contribute to the update."""
    algorithm = config.algorithm
    contribute = {
        f"algorithm.function={algorithm.function}": algorithm.function is not None,
        f"algorithm.adv_estimator={algorithm.adv_estimator}": algorithm.adv_estimator.startswith("reinforce"),
        f"algorithm.kl_loss_coef={algorithm.kl_loss_coef}": algorithm.kl_loss_coef != 0.0,
        f"algorithm.kl_reward_coef={algorithm.kl_reward_coef}": algorithm.kl_reward_coef != 0.0,
        f"algorithm.entropy_coeff={algorithm.entropy_coeff}": algorithm.entropy_coeff != 0.0,
        "algorithm.distillation": algorithm.distillation is not None,
    }
    for setting, is_given in contribute.items():
        if config.trainer.skip_zero_advantage and is_given:
            yield (
                f"trainer.skip_zero_advantage=true with {setting}: tokens of trajectories with equal rewards then "
                "contribute to the update, or may do so; set skip_zero_advantage=false"
            )


def _truncation_problems(config: Config) -> Iterator[str]:
    """Refuse ratios between the engine's truncated distribution and the trainer's whole one."""
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.keep_sampling_mask:
        yield from _kept_token_problems(config)
    elif rollout.truncated and algorithm.compares_with_engines:
        yield (
            f"rollout.top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p}: the engine then normalizes "
            "over the tokens that it keeps, but the trainer over the whole vocabulary, so every ratio of the two is "
            "too small; set top_p=1, top_k=-1, min_p=0 (those of evaluation may stay), or "
            "algorithm.keep_sampling_mask=true with a top_k, so that the trainer keeps the same tokens, or "
            "algorithm.behaviour_policy=recomputed without rollout_correction and off_policy_mask_threshold, which "
            "uses trainer log-probs only"
        )


def _kept_token_problems(config: Config) -> Iterator[str]:
    """Refuse sets of kept tokens that may be the whole vocabulary, and log-probs of a teacher that has not got them."""
    for section in ("rollout", "evaluation") if config.data.validation is not None else ("rollout",):
        if (top_k := getattr(config, section).top_k) <= 0:
            yield (
                f"algorithm.keep_sampling_mask=true with {section}.top_k={top_k}: engines then return the tokens that "
                "they sample from with every response, and top_k bounds their number; set "
                f"{section}.top_k, say to 64, or keep_sampling_mask=false"
            )
    if config.algorithm.teacher_engines is not None:
        yield (
            "algorithm.keep_sampling_mask=true with algorithm.distillation.engines: the teacher's engines normalize "
            "over the whole vocabulary; have the trainer score the responses, by removing the section engines, or set "
            "keep_sampling_mask=false"
        )


def algorithm_warnings(config: Config) -> Iterator[str]:
    """Yield settings that are allowed but probably unintended, one line each."""
    algorithm, bounds = config.algorithm, config.algorithm.clip_bounds
    if (algorithm.objective, algorithm.loss_agg_mode, bounds.weights) == ("bapo", "seq-mean-token-mean", "token"):
        yield (
            "algorithm.clip_bounds.weights=token with algorithm.loss_agg_mode=seq-mean-token-mean: the search weighs "
            "all tokens equally, but the loss weighs all sequences equally, so the positive share of the loss misses "
            "the target. Set clip_bounds.weights=loss, or loss_agg_mode=token-mean"
        )
    if algorithm.objective == "gspo" and algorithm.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"algorithm.loss_agg_mode={algorithm.loss_agg_mode} with algorithm.objective=gspo gives long sequences "
            "more weight, but GSPO weighs all sequences equally. Set loss_agg_mode=seq-mean-token-mean"
        )
