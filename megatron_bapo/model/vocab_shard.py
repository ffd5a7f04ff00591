"""Interface of one rank's computation with its rows of the output layer, for torch operators and Triton kernels.

Legend: C tokens of a chunk, H hidden size, V this rank's rows of the output layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

PADDING_LOGIT = -(2.0**100)
"""Logit of padding rows; finite, so its product with a probability of 0 is 0, and the same number in bfloat16."""


@dataclass(frozen=True)
class Softmax:
    """Softmax of a chunk over the whole vocabulary, with the terms that this rank needs; [C] each."""

    log_scale_C: Tensor
    """Offset for log-probabilities: log p = logit / temperature - (this rank's maximum of these) + log_scale."""
    label_C: Tensor
    """Local row of the label."""
    has_label_C: Tensor
    """Whether the row of the label is on this rank."""
    log_prob_C: Tensor
    entropy_C: Tensor


class VocabShard(Protocol):
    """Processes one chunk after another with one rank's rows, in memory that is allocated once."""

    def sums(self, hidden_CH: Tensor, label_C: Tensor, temperature: float) -> Tensor:
        """Return statistics of this rank's logits divided by the temperature, float32 [4, C].

        They are the maximum, the log-sum-exp minus that maximum, the entropy, and the logit of the label. `label_C` are
        local rows. A label on another rank is clamped to a local row, and its logit is meaningless.
        """
        ...

    def grad_logits(self, softmax: Softmax, grad_log_prob_C: Tensor, grad_entropy_C: Tensor | None = None) -> Tensor:
        """Return the gradient [C, V] by the logits, g (1[label] - p) - h p (log p + entropy), in the weight's dtype.

        It refers to the chunk of the last call of `sums` and may be called once, because it overwrites that chunk.
        """
        ...
