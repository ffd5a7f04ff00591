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
    """The tokens to which truncated sampling restricted the distribution of each of T tokens; M of all of them.

    They are in host memory, because a rank has those of all its micro-batches at once.
    """

    token_ids_M: np.ndarray
    """int32, one set after another."""
    sizes_T: np.ndarray
    """int64 number of tokens of each set."""

    def places(self, first_row: int, num_rows: int, device: torch.device) -> KeptPlaces:
        """Return the places of their logits among the rows of one rank, on its device."""
        num_tokens, row = len(self.sizes_T), self.token_ids_M - first_row
        token, here = np.repeat(np.arange(num_tokens, dtype=np.int32), self.sizes_T), (row >= 0) & (row < num_rows)
        if not here.all():
            token, row = token[here], row[here]
        starts = np.searchsorted(token, np.arange(num_tokens + 1, dtype=np.int32)).tolist()
        token_K, row_K = (torch.from_numpy(each).to(device).long() for each in (token, row))
        return KeptPlaces(token_K, row_K, starts)


@dataclass(frozen=True)
class KeptPlaces:
    """Places of the kept logits of T tokens among one rank's rows; K of all of them."""

    token_K: Tensor
    """int64 index into T, ascending."""
    row_K: Tensor
    starts: Sequence[int]
    """Index into K of the first one of each token's, and K."""

    def of(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """Return the indices of the logits of a chunk of tokens: (token of the chunk, row)."""
        part = slice(self.starts[tokens.start], self.starts[tokens.stop])
        return self.token_K[part] - tokens.start, self.row_K[part]


def keep_only(logits_CV: Tensor, kept: tuple[Tensor, Tensor]) -> None:
    """Set all logits but those at the places of `KeptPlaces.of` to `PADDING_LOGIT`."""
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
