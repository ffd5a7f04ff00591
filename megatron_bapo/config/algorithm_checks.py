"""Rules of the algorithm: what objective, sampling and corrections ask of each other."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.config.schema import Config


def algorithm_problems(config: Config) -> Iterator[str]:
    algorithm, rollout = config.algorithm, config.rollout
    if rollout.n == 1 and algorithm.adv_estimator != "reinforce_plus_plus":
        yield (
            f"rollout.n=1 with algorithm.adv_estimator={algorithm.adv_estimator}: a trajectory's advantage is its "
            "reward against its group's, zero in a group of one; set rollout.n to 2 or more, or "
            "adv_estimator=reinforce_plus_plus"
        )
    if algorithm.rollout_correction.active and algorithm.behaviour_policy == "rollout":
        yield (
            "algorithm.rollout_correction with algorithm.behaviour_policy=rollout: it corrects for what lies between "
            "the rollout's and the recomputed log-probs, and the ratios already start from the rollout's; set "
            "behaviour_policy=recomputed, or rollout_is=null and rollout_rs=null"
        )
    if algorithm.clip_ratio_c is not None and algorithm.objective == "cispo":
        yield (
            f"algorithm.clip_ratio_c={algorithm.clip_ratio_c} with algorithm.objective=cispo, whose weights are "
            "clipped at 1 + clip_ratio_high already; leave clip_ratio_c out"
        )
    buffer_length = algorithm.overlong.buffer_length or 0
    if buffer_length > rollout.max_response_length:
        yield (
            f"algorithm.overlong.buffer_length={buffer_length} must not exceed rollout.max_response_length="
            f"{rollout.max_response_length}, at whose end it lies; lower it"
        )
    yield from _truncation_problems(config)


def _truncation_problems(config: Config) -> Iterator[str]:
    """The engine's log-probs are those of the truncated distribution, the trainer's of the whole one."""
    algorithm, rollout = config.algorithm, config.rollout
    compared = algorithm.behaviour_policy == "rollout" or algorithm.rollout_correction.active
    if rollout.truncated and compared:
        yield (
            f"rollout.top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p}: the engine then "
            "renormalises over the tokens that it keeps, the trainer over the whole vocabulary, and every ratio of the "
            "two is too small; set top_p=1, top_k=-1, min_p=0 (evaluation.top_p and the like may stay), or compare the "
            "trainer with itself alone: algorithm.behaviour_policy=recomputed without rollout_correction"
        )


def algorithm_warnings(config: Config) -> Iterator[str]:
    algorithm, bounds = config.algorithm, config.algorithm.clip_bounds
    if (algorithm.objective, algorithm.loss_agg_mode, bounds.weights) == ("bapo", "seq-mean-token-mean", "token"):
        yield (
            "algorithm.clip_bounds.weights=token with algorithm.loss_agg_mode=seq-mean-token-mean: the bounds balance "
            "sums over tokens, the loss weighs every answer alike, so the share that they reach is not the loss's. Set "
            "clip_bounds.weights=loss, or loss_agg_mode=token-mean"
        )
    if algorithm.objective == "gspo" and algorithm.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"algorithm.loss_agg_mode={algorithm.loss_agg_mode} with algorithm.objective=gspo, which weighs every "
            "sequence alike: long ones weigh more. Set loss_agg_mode=seq-mean-token-mean"
        )
