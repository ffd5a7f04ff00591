"""The configuration's `algorithm` section: objective, advantages, and what is added to or corrects them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_bapo.config.presets import CLIP_BOUNDS_PRESETS, ClipBoundsPreset
from megatron_bapo.config.section import Fraction, NonNegativeFloat, Section

Objective = Literal["bapo", "ppo", "gspo", "cispo"]
AdvEstimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlType = Literal["k1", "k2", "k3"]
CorrectionLevel = Literal["token", "sequence", "geometric"]


class ClipBoundsSettings(Section):
    """BAPO's search ranges (arXiv 2510.18927, Algorithm 1). The defaults are the paper's."""

    preset: ClipBoundsPreset = "paper"
    """Values of the keys below that are not given."""
    positive_contribution_target: Fraction = 0.4
    ratio_lower_start: PositiveFloat = 0.6
    ratio_lower_max: PositiveFloat = 0.9
    ratio_lower_step: PositiveFloat = 0.02
    ratio_upper_start: PositiveFloat = 1.2
    ratio_upper_max: PositiveFloat = 3.0
    ratio_upper_step: PositiveFloat = 0.05
    contribution: Literal["value", "gradient"] = "value"
    """`value`: clipped surrogate of every token (Eq. 8); `gradient`: only tokens whose gradient is not clipped away."""
    weights: Literal["token", "loss"] = "token"
    """What a token's contribution weighs: 1, as in the authors' released code and by the paper's figures, or what the
    loss gives it by `loss_agg_mode`. Only with `seq-mean-token-mean` are the bounds others. Rollout correction weights
    contributions with both."""
    search_order: Literal["upper_first", "lower_first"] = "upper_first"
    target_measure: Literal["share", "ratio"] = "share"
    """`share` compares P/(P+N), `ratio` compares P/N, as the authors' released code does. The target is a share
    with both: P/N is compared with the ratio at which P/(P+N) is the target."""
    scope: Literal["minibatch", "microbatch"] = "minibatch"
    """`microbatch` finds bounds for each micro-batch, as the authors' released code does; they then depend on the
    layout and on the token budget."""
    method: Literal["score", "speculate"] = "score"
    """How a minibatch's bounds are found: `score` by a forward pass before the training pass, `speculate` by training
    at once with predicted bounds, and again where these turn out wrong. The updates are the same, bit for bit."""

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
                "method=speculate predicts a minibatch's bounds, and scope=microbatch finds each micro-batch's in its "
                "own forward pass; set method=score or scope=minibatch"
            )
        if not 1.0 <= self.ratio_upper_start <= self.ratio_upper_max:
            raise ValueError(
                f"need 1 <= ratio_upper_start <= ratio_upper_max, got {self.ratio_upper_start}, {self.ratio_upper_max}"
            )
        return self


class OverlongConfig(Section):
    """What an answer costs that nears or reaches rollout.max_response_length (DAPO, arXiv 2503.14476, section 3.4)."""

    mode: Literal["keep", "filter", "penalty"] = "keep"
    """`filter` leaves truncated answers out of the loss, not out of their group's advantages; `penalty` lowers the
    reward within the last `buffer_length` tokens, down to -penalty_factor."""
    buffer_length: PositiveInt | None = None
    penalty_factor: PositiveFloat = 1.0

    @model_validator(mode="after")
    def _buffer_given(self) -> Self:
        if (self.mode == "penalty") != (self.buffer_length is not None):
            raise ValueError("buffer_length goes with mode=penalty, and only with it")
        return self


class RolloutCorrectionConfig(Section):
    """Weights for the mismatch of trainer and engine and for staleness, proximal / rollout; verl's names."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Truncated importance sampling: each token's ratio, or its sequence's product, as the token's weight."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Largest weight."""
    rollout_rs: CorrectionLevel | None = None
    """Rejection: tokens are left out of the loss and of its denominators where their own ratio, their sequence's
    product or its geometric mean is outside."""
    rollout_rs_threshold: PositiveFloat = 2.0
    rollout_rs_threshold_lower: PositiveFloat | None = None
    """By default 1 / rollout_rs_threshold."""

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


class AlgorithmConfig(Section):
    objective: Objective = "bapo"
    """`bapo` moves the clip bounds at every update; `ppo` keeps 1 - clip_ratio_low and 1 + clip_ratio_high, and so do
    `gspo`, whose ratio is the sequence's, and `cispo`, which clips the weight of log p."""
    clip_bounds: ClipBoundsSettings = ClipBoundsSettings()
    clip_ratio_low: Fraction = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    clip_ratio_c: Annotated[float, Field(gt=1.0)] | None = None
    """Dual clip: ratio from which on a token with a negative advantage has no gradient. BAPO's search does not know it,
    as in the authors' released code: beyond it contributions go on growing with the ratio."""
    adv_estimator: AdvEstimator = "grpo"
    norm_adv_by_std: bool = True
    """GRPO's advantages: reward minus the group's mean, divided by the group's standard deviation."""
    loss_agg_mode: LossAggMode = "token-mean"
    """`seq-mean-token-sum-norm` divides by rollout.max_response_length (Dr. GRPO)."""
    behaviour_policy: Literal["rollout", "recomputed"] = "rollout"
    """Denominator of the ratios: the engine's log-probs, or those of the weights at the start of each step, which the
    trainer computes in an additional pass (decoupled, proximal)."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Needs behaviour_policy=recomputed."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Of an entropy bonus in the loss."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Of the KL to the policy at the start of RL in the loss. Not 0 keeps a frozen copy of it on every rank."""
    kl_loss_type: KlType = "k3"
    kl_reward_coef: NonNegativeFloat = 0.0
    """Of the same KL in the reward, between the ratio's denominator and the frozen copy."""
    kl_reward_type: KlType = "k1"
    overlong: OverlongConfig = OverlongConfig()

    @property
    def needs_reference(self) -> bool:
        return self.kl_loss_coef > 0.0 or self.kl_reward_coef > 0.0
