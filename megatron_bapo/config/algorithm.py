"""The section `algorithm`: objective, clip bounds, advantages, KL penalties, distillation and rollout correction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_bapo.config.presets import CLIP_BOUNDS_PRESETS, ClipBoundsPreset
from megatron_bapo.config.rollout import EngineSizeConfig
from megatron_bapo.config.section import (
    Fraction,
    FunctionName,
    NonNegativeFloat,
    PartialFraction,
    Section,
    check_required,
)

Objective = Literal["bapo", "ppo", "gspo", "cispo", "sapo", "distill", "function"]
AdvEstimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "function"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlType = Literal["k1", "k2", "k3"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


class ClipBoundsSettings(Section):
    """Search for BAPO's clip bounds (arXiv 2510.18927, Algorithm 1). The defaults are the paper's values.

    P and N are the absolute contributions of tokens with positive and with negative advantage to the loss."""

    preset: ClipBoundsPreset = "paper"
    """Named set of values for this section. A key that is given beside the preset takes precedence."""
    positive_contribution_target: Fraction = 0.4
    """Target for the share P/(P+N) of the positive tokens (rho_0 in the paper). With 0 the bounds never move."""
    ratio_lower_start: PositiveFloat = 0.6
    """Lower clip bound at which the search starts in every update (a-)."""
    ratio_lower_max: PositiveFloat = 0.9
    """Highest value of the lower clip bound (b-), at most 1."""
    ratio_lower_step: PositiveFloat = 0.02
    """Step by which the search raises the lower clip bound (delta_2)."""
    ratio_upper_start: PositiveFloat = 1.2
    """Upper clip bound at which the search starts in every update (a+), at least 1."""
    ratio_upper_max: PositiveFloat = 3.0
    """Highest value of the upper clip bound (b+)."""
    ratio_upper_step: PositiveFloat = 0.05
    """Step by which the search raises the upper clip bound (delta_1)."""
    contribution: Literal["value", "gradient"] = "value"
    """Tokens that count towards P and N: `value` counts the clipped surrogate of every token (Eq. 8), `gradient` only
    that of tokens whose gradient is not clipped."""
    weights: Literal["token", "loss"] = "token"
    """Weight of each token's contribution: `token` is 1, as in the authors' released code and the paper's figures;
    `loss` is the token's weight in the loss, which changes the bounds only with `loss_agg_mode=seq-mean-token-mean`.
    The weights of rollout correction apply in both cases."""
    search_order: Literal["upper_first", "lower_first"] = "upper_first"
    """Bound that the search moves first: the upper one, as in the paper, or the lower one, as in the authors' released
    code."""
    target_measure: Literal["share", "ratio"] = "share"
    """Measure that is compared with the target: `share` is P/(P+N); `ratio` is P/N, as in the authors' released code,
    and is compared with target / (1 - target)."""
    scope: Literal["minibatch", "microbatch"] = "minibatch"
    """Tokens that share one pair of bounds. `microbatch` is what the authors' released code does; the bounds then
    depend on the parallel layout and on the token budget."""
    method: Literal["score", "speculate"] = "score"
    """How a minibatch's bounds are found: `score` runs a forward pass before the training pass, unless the minibatch is
    one micro-batch on every rank; `speculate` trains with predicted bounds and repeats the pass when the prediction was
    wrong. Both give bitwise equal updates."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        preset: Any = values.get("preset") if isinstance(values, dict) else None
        return CLIP_BOUNDS_PRESETS[preset] | values if preset in get_args(ClipBoundsPreset) else values

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.ratio_lower_start <= self.ratio_lower_max <= 1.0:
            raise ValueError(
                f"need ratio_lower_start <= ratio_lower_max <= 1, got {self.ratio_lower_start}, {self.ratio_lower_max}"
            )
        if self.scope == "microbatch" and self.method == "speculate":
            raise ValueError(
                "method=speculate predicts the bounds of a minibatch, but scope=microbatch searches them in each "
                "micro-batch's own forward pass; set method=score or scope=minibatch"
            )
        if not 1.0 <= self.ratio_upper_start <= self.ratio_upper_max:
            raise ValueError(
                f"need 1 <= ratio_upper_start <= ratio_upper_max, got {self.ratio_upper_start}, {self.ratio_upper_max}"
            )
        return self


class OverlongConfig(Section):
    """Treatment of responses that near or reach rollout.max_response_length (DAPO, arXiv 2503.14476, section 3.4)."""

    mode: Literal["keep", "filter", "penalty"] = "keep"
    """`keep` treats truncated responses like any others; `filter` excludes them from the loss, but not from the
    advantages of their group; `penalty` subtracts up to `penalty_factor` from the reward of responses that end within
    the last `buffer_length` tokens."""
    buffer_length: PositiveInt | None = None
    """Number of tokens below rollout.max_response_length over which the penalty grows linearly from 0; required by
    `mode=penalty`, and allowed only there."""
    penalty_factor: PositiveFloat = 1.0
    """Penalty of a response that reaches rollout.max_response_length."""

    @model_validator(mode="after")
    def _buffer_given(self) -> Self:
        check_required("buffer_length", self.buffer_length, "mode=penalty", is_chosen=self.mode == "penalty")
        return self


class RolloutCorrectionConfig(Section):
    """Importance sampling and rejection by the ratio of recomputed (proximal) to rollout probabilities.

    It corrects for staleness and for numerical differences between trainer and engine, and needs
    behaviour_policy=recomputed. The keys have verl's names."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Truncated importance sampling: the weight of a token is its own ratio (`token`) or the product of the ratios of
    its sequence (`sequence`); null: every weight is 1."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Largest importance weight; higher ratios are truncated to it."""
    rollout_rs: CorrectionLevel | None = None
    """Rejection sampling: exclude tokens from the loss and its normalization if their ratio (`token`), the product of
    the ratios of their sequence (`sequence`) or its geometric mean (`geometric`) is outside the thresholds; null:
    nothing is rejected."""
    rollout_rs_threshold: PositiveFloat = 2.0
    """Upper rejection threshold, at least 1."""
    rollout_rs_threshold_lower: PositiveFloat | None = None
    """Lower rejection threshold, at most 1; null: 1 / rollout_rs_threshold."""

    @property
    def active(self) -> bool:
        return self.rollout_is is not None or self.rollout_rs is not None

    @property
    def lower_threshold(self) -> float:
        return self.rollout_rs_threshold_lower or 1.0 / self.rollout_rs_threshold

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.lower_threshold <= 1.0 <= self.rollout_rs_threshold:
            raise ValueError(
                "need rollout_rs_threshold_lower <= 1 <= rollout_rs_threshold, or equal policies are rejected; got "
                f"{self.lower_threshold}, {self.rollout_rs_threshold}"
            )
        return self


class TeacherEnginesConfig(EngineSizeConfig):
    """vLLM engines that serve the teacher, on GPUs of their own.

    They score each response when it is finished, and the trainer holds no teacher. Without this section, every trainer
    rank loads its shard of the teacher."""


class DistillationConfig(Section):
    """On-policy distillation: the reverse KL divergence to a teacher, on the policy's own samples, in the loss.

    It is the whole objective with `objective=distill`, and a term beside any other objective."""

    teacher: Path
    """Folder of the teacher's Hugging Face checkpoint. Its tokens must be the policy's; its size and family may
    differ."""
    coef: PositiveFloat = 1.0
    """Coefficient of the divergence in the loss."""
    max_ratio: Annotated[float, Field(ge=1.0)] = 2.0
    """Largest importance ratio of a token's divergence; higher ratios are truncated to it."""
    engines: TeacherEnginesConfig | None = None


class AlgorithmConfig(Section):
    """Policy loss and advantages."""

    objective: Objective = "bapo"
    """Policy loss. `bapo` adapts the clip bounds at every update; the others keep them at 1 - clip_ratio_low and
    1 + clip_ratio_high: `ppo` clips the ratio of each token, `gspo` that of each sequence, and `cispo` clips the
    importance weight of log p, so that every token keeps its gradient. `sapo` has no bounds: the gradient of a token
    fades as its ratio leaves 1. `distill` uses no rewards: it minimizes the divergence from the teacher of the section
    `distillation`. `function` is the user's own."""
    function: FunctionName | None = None
    """The user's objective, `path.to.module:function`, with the arguments (log_ratio, log_probs, advantages, low,
    high), which returns the value of each token; required by `objective=function`."""
    clip_bounds: ClipBoundsSettings = ClipBoundsSettings()
    clip_ratio_low: Fraction = 0.2
    """Distance of the fixed lower clip bound from 1, for `objective=ppo`, `gspo`, `cispo` and `function`."""
    clip_ratio_high: PositiveFloat = 0.2
    """Distance of the fixed upper clip bound from 1, for `objective=ppo`, `gspo`, `cispo` and `function`."""
    tau_pos: PositiveFloat = 1.0
    """How fast `sapo` fades the gradient of tokens with positive advantage; higher is faster."""
    tau_neg: PositiveFloat = 1.05
    """How fast `sapo` fades the gradient of tokens with negative advantage."""
    clip_ratio_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: a token with negative advantage has no gradient when its ratio exceeds this value; null: no dual clip.
    The search for BAPO's bounds ignores it, as in the authors' released code."""
    adv_estimator: AdvEstimator = "grpo"
    """Advantage estimator: `grpo` subtracts the mean reward of the group, `rloo` the mean of the other responses of the
    group; `reinforce_plus_plus` normalizes rewards over the whole batch, with `_baseline` after subtracting the group
    mean. `function` is the user's own."""
    adv_function: FunctionName | None = None
    """The user's advantage estimator, `path.to.module:function`, with the arguments (rewards, lengths), a row for each
    group, which returns the advantage of each response; required by `adv_estimator=function`."""
    norm_adv_by_std: bool = True
    """Divide GRPO's advantages by the standard deviation of the group's rewards."""
    min_positive_loss_share: PartialFraction = 0.0
    """Multiply the positive advantages of each minibatch by one factor of at least 1, so that they have at least this
    share of the sum of w|A| over its tokens, where w is the weight of the token in the loss, times that of rollout
    correction. With 0 the advantages do not change."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Normalization of the loss over the minibatch: `token-mean` is the mean over all tokens; the others are the mean
    over sequences of the sum of token losses (`seq-mean-token-sum`), of their mean (`seq-mean-token-mean`), or of their
    sum divided by rollout.max_response_length (`seq-mean-token-sum-norm`, Dr. GRPO)."""
    behaviour_policy: Literal["rollout", "recomputed"] = "rollout"
    """Denominator of the ratios: the log-probs that the engines reported, or those that the trainer recomputes in an
    additional pass with the weights at the start of the step (decoupled PPO)."""
    routing_replay: Literal["none", "trainer", "rollout"] = "none"
    """Experts that the trainer uses in a mixture-of-experts model: those that the router chooses in each pass (`none`),
    in the updates those that it chose in the pass that recomputed the log-probs (`trainer`, which needs
    behaviour_policy=recomputed), or in all passes those that the engines chose (`rollout`)."""
    keep_sampling_mask: bool = False
    """Compute all log-probs of the trainer over the tokens that rollout.top_p, top_k and min_p had kept when the token
    was sampled (Keep Sampling Mask of DeepSeek-V3.2, arXiv 2512.02556), so that truncated rollouts have exact ratios.
    Needs rollout.top_k, and evaluation.top_k if there are held-out prompts."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    off_policy_mask_threshold: PositiveFloat | None = None
    """Off-policy sequence masking: a negative advantage counts as 0 if the mean of the response's log-ratios of the
    engine's policy to the current one exceeds this value, in nats; null: no masking. The token then has no part in the
    objective, whatever the objective is."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus in the loss."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty to the reference model (the policy at the start of RL) in the loss. A non-zero
    value loads the frozen reference model on every rank."""
    kl_loss_type: KlType = "k3"
    """KL estimator in the loss: `k1` is x, `k2` is x^2 / 2 and `k3` is exp(-x) - 1 + x, where x is the log-ratio of
    policy to reference model."""
    kl_loss_unbiased: bool = False
    """Weight the KL in the loss with the ratio of the current to the behaviour policy, so that its gradient is that of
    the KL under the current policy, whatever the estimator."""
    kl_reward_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL penalty in the reward, between `behaviour_policy` and the reference model. A non-zero value
    loads the frozen reference model on every rank."""
    kl_reward_type: KlType = "k1"
    """KL estimator in the reward, as in `kl_loss_type`."""
    distillation: DistillationConfig | None = None
    overlong: OverlongConfig = OverlongConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        own_objective, own_advantages = self.objective == "function", self.adv_estimator == "function"
        check_required("algorithm.function", self.function, "algorithm.objective=function", is_chosen=own_objective)
        choice = "algorithm.adv_estimator=function"
        check_required("algorithm.adv_function", self.adv_function, choice, is_chosen=own_advantages)
        return self

    @property
    def fixed_bounds(self) -> tuple[float, float]:
        """Clip bounds (low, high) of objectives other than BAPO."""
        if self.objective == "sapo":
            return 0.0, math.inf
        if self.objective == "distill" and self.distillation is not None:
            return 0.0, self.distillation.max_ratio
        return 1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high

    @property
    def compares_with_engines(self) -> bool:
        """Whether the loss depends on the engines' log-probs."""
        masks = self.off_policy_mask_threshold is not None
        return self.behaviour_policy == "rollout" or self.rollout_correction.active or masks

    @property
    def replays_rollout(self) -> bool:
        """Whether the engines return more than tokens and log-probs for the trainer to replay."""
        return self.routing_replay == "rollout" or self.keep_sampling_mask

    @property
    def compares_responses(self) -> bool:
        """Whether the loss of a token depends on the current log-probs of its whole response."""
        return self.objective == "gspo" or self.off_policy_mask_threshold is not None

    @property
    def searches_minibatch(self) -> bool:
        """Whether clip bounds are for a whole minibatch, which may need scoring passes (`trainer/bound_scopes.py`)."""
        return self.objective == "bapo" and self.clip_bounds.scope == "minibatch"

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference model is loaded."""
        return self.kl_loss_coef > 0.0 or self.kl_reward_coef > 0.0

    @property
    def has_token_advantages(self) -> bool:
        """Whether the tokens of a trajectory have advantages of their own, because each has its own KL penalties."""
        return self.adv_estimator == "reinforce_plus_plus" and self.kl_reward_coef > 0.0

    @property
    def teacher_engines(self) -> TeacherEnginesConfig | None:
        """The engines that serve the teacher; None without a teacher, and if the trainer holds it."""
        return self.distillation and self.distillation.engines

    @property
    def recorded_teacher(self) -> str:
        """Folder of the teacher whose log-probs the responses carry; empty if they carry none."""
        return str(self.distillation.teacher) if self.distillation and self.distillation.engines else ""

    @property
    def trainer_holds_teacher(self) -> bool:
        """Whether every trainer rank loads its shard of the teacher."""
        return self.distillation is not None and self.distillation.engines is None

    @property
    def scores_batch(self) -> bool:
        """Whether the trainer scores trajectories before the updates, with the policy, reference model or teacher."""
        return self.behaviour_policy == "recomputed" or self.needs_reference or self.trainer_holds_teacher
