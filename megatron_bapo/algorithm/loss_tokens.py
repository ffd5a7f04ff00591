"""Per-token inputs of a policy loss. Shapes: T packed tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossTokens:
    """Per-token inputs of the loss besides the current log-probs, [T] each."""

    behaviour_log_probs_T: Tensor
    """Log-probs in the denominator of the ratio."""
    advantages_T: Tensor
    weights_T: Tensor
    """Loss weights (see `token_weights`). Tokens of weight 0 are ignored."""
    correction_T: Tensor | None = None
    """Rollout correction of the objective. Tokens with correction 0 are rejected and ignored."""
    reference_log_probs_T: Tensor | None = None
    """Log-probs under the reference model, required if `kl_loss_coef` is non-zero."""
    sequence_log_ratio_T: Tensor | None = None
    """Log-ratio of the sequence for GSPO, without a gradient."""
    teacher_log_probs_T: Tensor | None = None
    """Log-probs under the teacher, required by `distillation`."""
    masked_T: Tensor | None = None
    """Which tokens off-policy sequence masking takes out of the objective; their advantages are 0."""

    def __getitem__(self, tokens: slice) -> LossTokens:
        return LossTokens(*(None if values_T is None else values_T[tokens] for values_T in vars(self).values()))  # pyright: ignore[reportArgumentType]
