"""Interface of one rank's computation with its rows of the output layer, for torch operators and Triton kernels.

Legend: C tokens of a chunk, H hidden size, V this rank's rows of the output layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PADDING_LOGIT = -(2.0**100)
"""Logit of padding rows, and of tokens that were not kept; finite, so its product with a probability of 0 is 0, and the
same number in bfloat16."""


@dataclass(frozen=True)
class KeptTokens:
    """The tokens to which truncated sampling restricted the distribution of each of T tokens; M of all of them."""

    token_ids_M: Tensor
    """int64, one set after another."""
    owner_M: Tensor
    """int64 index into T, ascending."""
    starts: Sequence[int]
    """Index into M of the first one of each token's, and M."""

    @classmethod
    def of(cls, token_ids_M: np.ndarray, sizes_T: np.ndarray, device: torch.device) -> KeptTokens:
        """Return the sets of `sizes_T` tokens that are one after another in `token_ids_M`."""
        return cls(
            torch.from_numpy(token_ids_M.astype(np.int64)).to(device),
            torch.from_numpy(np.repeat(np.arange(len(sizes_T)), sizes_T)).to(device),
            np.cumsum([0, *sizes_T]).tolist(),
        )

    def in_rows(self, tokens: slice, start: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the places of the kept logits of a chunk of tokens, among `num_rows` rows that begin at `start`."""
        part = slice(self.starts[tokens.start], self.starts[tokens.stop])
        token, row = self.owner_M[part] - tokens.start, self.token_ids_M[part] - start
        here = (row >= 0) & (row < num_rows)
        return token[here], row[here]


def keep_only(logits_CV: Tensor, kept: tuple[Tensor, Tensor]) -> None:
    """Set all logits but those at the places of `KeptTokens.in_rows` to `PADDING_LOGIT`."""
    values = logits_CV[kept]
    logits_CV.fill_(PADDING_LOGIT)
    logits_CV[kept] = values


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

    def sums(
        self, hidden_CH: Tensor, label_C: Tensor, temperature: float, kept: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return statistics of this rank's logits divided by the temperature, float32 [4, C].

        They are the maximum, the log-sum-exp minus that maximum, the entropy, and the logit of the label. `label_C` are
        local rows. A label on another rank is clamped to a local row, and its logit is meaningless. `kept` are the
        places (token, row) of the logits of a truncated distribution; None: it is not truncated.
        """
        ...

    def grad_logits(self, softmax: Softmax, grad_log_prob_C: Tensor, grad_entropy_C: Tensor | None = None) -> Tensor:
        """Return the gradient [C, V] by the logits, g (1[label] - p) - h p (log p + entropy), in the weight's dtype.

        It refers to the chunk of the last call of `sums` and may be called once, because it overwrites that chunk.
        """
        ...
