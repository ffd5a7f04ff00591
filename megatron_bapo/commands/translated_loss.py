"""Translation of NeMo-RL's loss and reward keys, several of which together set ours.

Sources: ClippedPGLossFn (`nemo_rl/algorithms/loss/loss_functions.py`), `advantage_estimator.py`, `reward_functions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_bapo.commands.translated_layout import Absent, Derived, Get
from megatron_bapo.config.foreign_values import whole

UNTRUNCATED = 5e8
"""A rollout_is_threshold that no importance weight reaches: log-ratios are clamped at 20, and e^20 is 4.9e8."""
KEPT_IN_MEANS = "NeMo-RL counts rejected tokens in the denominators of its means, here they are left out"


def nemo_rl_loss(theirs: Get, ours: Get) -> Iterator[Derived | Absent]:
    yield from _kl(theirs)
    yield from _rollout_correction(theirs)
    yield from _truncated_responses(theirs, ours)


def _kl(theirs: Get) -> Iterator[Derived | Absent]:
    """Yield the KL estimator, which stays what it is in the reward, where it has no gradient."""
    coefficient = theirs("loss_fn.reference_policy_kl_penalty")
    if not coefficient:
        return
    kind = theirs("loss_fn.reference_policy_kl_type") or "k3"
    if theirs("loss_fn.use_kl_in_reward"):
        if theirs("grpo.adv_estimator.name") == "reinforce_plus_plus":
            yield Derived("algorithm.kl_reward_coef", coefficient, "")
            yield Derived("algorithm.kl_reward_type", kind, "")
        else:
            reason = "with it and this advantage estimator, NeMo-RL adds the KL neither to the reward nor to the loss"
            yield Absent("loss_fn.use_kl_in_reward", True, f"{reason}, and there is none in the result")
        return
    how = f"{kind} of NeMo-RL has the gradient of the samples' probability as well, which is k2's gradient here"
    if kind == "k2":
        how = "NeMo-RL adds the gradient of the samples' probability to k2's, which is not here"
    yield Derived("algorithm.kl_loss_type", "k2", how)


def _rollout_correction(theirs: Get) -> Iterator[Derived | Absent]:
    """Yield importance weights and rejection. A combination that NeMo-RL refuses is not translated."""
    truncated, ours = "loss_fn.truncated_importance_sampling", "algorithm.rollout_correction"
    kind, upper, lower = (theirs(f"{truncated}_{name}") for name in ("type", "ratio", "ratio_min"))
    if not theirs("loss_fn.use_importance_sampling_correction"):
        if kind:
            reason = "NeMo-RL refuses it without loss_fn.use_importance_sampling_correction; nothing is corrected here"
            yield Absent(f"{truncated}_type", kind, reason)
        return
    level = "sequence" if theirs("loss_fn.sequence_level_importance_ratios") else "token"
    yield Derived(f"{ours}.rollout_is", level, "")
    rejects = {"icepop": level, "seq-mask-tis": "geometric"}.get(str(kind))
    if kind is None and upper is None:
        how = "NeMo-RL truncates no weight without truncated_importance_sampling_type"
        yield Derived(f"{ours}.rollout_is_threshold", UNTRUNCATED, how)
    elif refusal := _refusal(kind, upper, lower, level):
        reason = f"NeMo-RL refuses it {refusal}; weights are truncated at the default here, and nothing is rejected"
        yield Absent(f"{truncated}_type", kind, reason)
    elif rejects is None:
        yield Derived(f"{ours}.rollout_is_threshold", upper, "")
        if lower:
            yield Absent(
                f"{truncated}_ratio_min", lower, "smaller weights are not raised to it: they have no lower bound"
            )
    else:
        how = "sequences that are kept have weights without a bound" if kind == "seq-mask-tis" else ""
        yield Derived(f"{ours}.rollout_is_threshold", UNTRUNCATED if how else upper, how)
        yield Derived(f"{ours}.rollout_rs", rejects, KEPT_IN_MEANS)
        yield Derived(f"{ours}.rollout_rs_threshold", upper, "")
        yield Derived(f"{ours}.rollout_rs_threshold_lower", lower, "")


def _refusal(kind: str | None, upper: float | None, lower: float | None, level: str) -> str:
    """Return why NeMo-RL refuses a truncation; empty if it takes it."""
    if kind not in ("tis", "icepop", "seq-mask-tis"):
        return "unless truncated_importance_sampling_type is tis, icepop or seq-mask-tis"
    if not upper:
        return "without truncated_importance_sampling_ratio"
    if kind != "tis" and lower is None:
        return "without truncated_importance_sampling_ratio_min"
    if kind == "seq-mask-tis" and level == "sequence":
        return "with sequence_level_importance_ratios"
    return ""


def _truncated_responses(theirs: Get, ours: Get) -> Iterator[Derived | Absent]:
    """Yield the penalty of long responses, or the factor of truncated ones, which takes precedence in NeMo-RL."""
    section = "grpo.reward_shaping"
    if not theirs(f"{section}.enabled"):
        return
    factor = theirs(f"{section}.stop_properly_penalty_coef")
    if factor == 0:
        yield Derived("reward.truncated_reward", 0.0, "NeMo-RL multiplies rewards of truncated responses by 0")
    elif factor not in (None, 1):
        reason = "multiply the reward in reward.function, which may take finish_reason (`length` if truncated)"
        yield Absent(f"{section}.stop_properly_penalty_coef", factor, reason)
    if factor is not None:
        return
    names = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
    buffer, penalty, longest = (theirs(f"{section}.{name}") for name in names)
    length = whole(ours("rollout.max_response_length"))
    if not (whole(buffer) and isinstance(penalty, int | float) and penalty and whole(longest) and length):
        return
    # The penalty grows from longest - buffer on by penalty / buffer a token, also past `longest`.
    own_buffer = length - (longest - buffer)
    if own_buffer <= 0:
        reason = f"no response is longer than {length} tokens, and there is no penalty below {longest - buffer}"
        yield Absent(f"{section}.enabled", True, reason)
        return
    if ours("algorithm.overlong.mode") == "filter":
        reason = "algorithm.overlong.mode is either filter or penalty, and penalty in the result"
        yield Absent("grpo.overlong_filtering", True, reason)
    how = "" if own_buffer == buffer else f"the penalty grows from {longest - buffer} tokens to {length}"
    yield Derived("algorithm.overlong.mode", "penalty", "")
    yield Derived("algorithm.overlong.buffer_length", own_buffer, how)
    yield Derived("algorithm.overlong.penalty_factor", penalty * own_buffer / buffer, how)
