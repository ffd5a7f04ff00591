"""The section `optimizer`: Adam and the schedule of its learning rate."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from megatron_bapo.config.section import NonNegativeFloat, NonNegativeInt, PartialFraction, Section, check_required

BFLOAT16_MAX_BETA = 1 - 2**-8
"""Largest beta with which a moment in bfloat16, which has 8 significant bits, always decays."""


class OptimizerConfig(Section):
    """Adam with decoupled weight decay, as Megatron implements it. Schedules are counted in optimizer updates."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    lr_warmup_steps: NonNegativeInt = 0
    """Number of updates of linear warm-up; the first one has the rate lr / (lr_warmup_steps + 1)."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "constant"
    """Shape of the decay. `WSD` (warm-up, stable, decay) stays at `lr` until the last `lr_wsd_decay_steps` updates."""
    lr_decay_steps: PositiveInt | None = None
    """Number of updates, including the warm-up, at which the decay ends; null: all updates of the run, whose
    trainer.total_steps can then not be changed later, except with `inverse-square-root`."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Shape of the decay phase of `WSD`."""
    lr_wsd_decay_steps: PositiveInt | None = None
    """Number of updates in the decay phase of `WSD`; required by `lr_decay_style=WSD`, and allowed only there."""
    weight_decay: NonNegativeFloat = 0.1
    """Coefficient of the decoupled weight decay."""
    adam_beta1: PartialFraction = 0.9
    """Decay rate of Adam's first moment."""
    adam_beta2: PartialFraction = 0.999
    """Decay rate of Adam's second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Term in Adam's denominator for numerical stability."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum norm of the gradient; 0 disables gradient clipping."""
    grads_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are summed over micro-batches and ranks and kept until the update. `bfloat16` halves
    their memory and their communication, and needs model.dtype=bfloat16; Adam still computes in float32."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of Adam's moments between updates. `bfloat16` halves their memory; an update computes in float32 and
    rounds the moments. It needs adam_beta1 and adam_beta2 <= 0.996."""
    cpu_offload: bool = False
    """Keep the fp32 parameters and Adam's moments in host memory and update them there; needs
    parallel.use_distributed_optimizer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"need min_lr <= lr, got {self.min_lr}, {self.lr}")
        for key in ("adam_beta1", "adam_beta2"):
            if self.moments_dtype == "bfloat16" and (beta := getattr(self, key)) > BFLOAT16_MAX_BETA:
                raise ValueError(
                    f"moments_dtype=bfloat16 with {key}={beta}: bfloat16 rounds a change by less than 1/256 of a value "
                    f"away, so the moment would not decay; set {key}={BFLOAT16_MAX_BETA:.3f} or lower, or "
                    "moments_dtype=float32"
                )
        is_wsd = self.lr_decay_style == "WSD"
        check_required("lr_wsd_decay_steps", self.lr_wsd_decay_steps, "lr_decay_style=WSD", is_chosen=is_wsd)
        if self.lr_decay_steps is not None and self.lr_decay_style == "constant":
            raise ValueError(
                "lr_decay_steps has no effect with lr_decay_style=constant; set another lr_decay_style, or remove "
                "lr_decay_steps"
            )
        if self.lr_decay_steps is not None and self.lr_decay_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"need lr_warmup_steps < lr_decay_steps, got {self.lr_warmup_steps}, {self.lr_decay_steps}"
            )
        return self
