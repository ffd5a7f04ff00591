"""Triton kernels for one rank's part of the softmax over the vocabulary; each reads the logits of a chunk once.

The logits have the dtype of the output layer, and their gradient overwrites them, so a chunk needs one tensor [C, V].
Everything is computed in float32. Legend: C tokens of a chunk, H hidden size, V this rank's rows of the output layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_bapo.model.vocab_shard import PADDING_LOGIT, Softmax, keep_only

NUM_WARPS = 4
BLOCK = 1024
"""Number of neighbouring logits that a program loads at once: 8, which are 16 bytes, for each thread."""
NUM_BLOCKS = 4
"""Number of blocks that `_sums` loads before it adds them up."""
LN_2 = tl.constexpr(math.log(2))


class FusedShard:
    """`VocabShard` of Triton kernels."""

    def __init__(self, weight_VH: Tensor, num_valid_rows: int, num_tokens: int) -> None:
        self._weight_VH, self._num_valid_rows = weight_VH, num_valid_rows
        self._logits_CV = weight_VH.new_empty(num_tokens, len(weight_VH))
        self._max_C, self._temperature = weight_VH.new_empty(0), 1.0

    def sums(
        self, hidden_CH: Tensor, label_C: Tensor, temperature: float, kept: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        logits_CV = self._logits_CV[: len(hidden_CH)]
        torch.mm(hidden_CH, self._weight_VH.T, out=logits_CV)
        if kept is not None:
            keep_only(logits_CV, kept)
        return self.sums_of_logits(label_C, temperature)

    def sums_of_logits(self, label_C: Tensor, temperature: float) -> Tensor:
        """Return the statistics of `sums` for the logits in memory."""
        num_tokens, num_rows = len(label_C), len(self._weight_VH)
        own_4C = torch.empty(4, num_tokens, device=label_C.device)
        launch: Any = _sums[(num_tokens,)]
        launch(
            *(self._logits_CV, label_C, own_4C, num_tokens, num_rows),
            *(self._num_valid_rows, 1 / temperature, PADDING_LOGIT),
            NUM_BLOCKS=NUM_BLOCKS,
            BLOCK=min(BLOCK, triton.next_power_of_2(num_rows)),
            num_warps=NUM_WARPS,
        )
        self._max_C, self._temperature = own_4C[0].clone(), temperature
        return own_4C

    def grad_logits(self, softmax: Softmax, grad_log_prob_C: Tensor, grad_entropy_C: Tensor | None = None) -> Tensor:
        num_tokens, num_rows = len(softmax.label_C), len(self._weight_VH)
        logits_CV, block = self._logits_CV[:num_tokens], min(BLOCK, triton.next_power_of_2(num_rows))
        launch: Any = _grad_logits[(num_tokens, triton.cdiv(num_rows, block))]
        launch(
            *(logits_CV, self._max_C, softmax.log_scale_C, softmax.entropy_C, softmax.label_C, softmax.has_label_C),
            *(grad_log_prob_C, grad_log_prob_C if grad_entropy_C is None else grad_entropy_C),
            *(num_rows, self._num_valid_rows, 1 / self._temperature),
            OF_ENTROPY=grad_entropy_C is not None,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )
        return logits_CV


@triton.jit
def _sums(
    logits_CV,
    label_C,
    own_4C,
    num_tokens,
    num_rows,
    num_valid_rows,
    inverse_temperature,
    padding_logit,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token: maximum m, sum of exp(x - m), and sum of (x - m) exp(x - m).

    Each column of a block keeps these of its own logits, so threads exchange nothing before the last step. Until then x
    is in units of ln 2, because GPUs compute powers of 2.
    """
    token = tl.program_id(0).to(tl.int64)
    logits_V = logits_CV + token * num_rows
    offset = tl.arange(0, NUM_BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    factor = inverse_temperature / LN_2
    # A finite initial value, so the first change of the maximum multiplies zeros by a finite number.
    largest = tl.full([BLOCK], padding_logit, tl.float32) * factor
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_rows, NUM_BLOCKS * BLOCK):
        row = start + offset
        x = tl.load(logits_V + row, mask=row < num_valid_rows, other=padding_logit).to(tl.float32) * factor
        new_largest = tl.maximum(largest, tl.max(x, 0))
        change = largest - new_largest
        scale = tl.exp2(change)
        x = x - new_largest[None, :]
        exp = tl.exp2(x)
        weighted = scale * (weighted + change * total) + tl.sum(x * exp, 0)
        total = scale * total + tl.sum(exp, 0)
        largest = new_largest
    max_of_all = tl.max(largest, 0)
    change = largest - max_of_all
    scale = tl.exp2(change)
    weighted_of_all = tl.sum(scale * (weighted + change * total), 0) * LN_2
    total_of_all = tl.sum(scale * total, 0)
    label = tl.load(label_C + token)
    label_logit = tl.load(logits_V + label).to(tl.float32) * inverse_temperature
    tl.store(own_4C + token, max_of_all * LN_2)
    tl.store(own_4C + num_tokens + token, tl.log(total_of_all))
    tl.store(own_4C + 2 * num_tokens + token, tl.log(total_of_all) - weighted_of_all / total_of_all)
    tl.store(own_4C + 3 * num_tokens + token, tl.where(label < num_valid_rows, label_logit, padding_logit))


@triton.jit
def _grad_logits(
    logits_CV,
    max_C,
    log_scale_C,
    entropy_C,
    label_C,
    has_label_C,
    grad_log_prob_C,
    grad_entropy_C,
    num_rows,
    num_valid_rows,
    inverse_temperature,
    OF_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of logits of a token; it overwrites the logits with their gradient."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits_CV + token * num_rows + row
    x = tl.load(place, mask=row < num_valid_rows, other=0.0).to(tl.float32) * inverse_temperature
    log_prob = x - tl.load(max_C + token) + tl.load(log_scale_C + token)
    prob = tl.where(row < num_valid_rows, tl.exp(log_prob), 0.0)
    of_log_prob = tl.load(grad_log_prob_C + token)
    factor = of_log_prob
    if OF_ENTROPY:
        factor += tl.load(grad_entropy_C + token) * (log_prob + tl.load(entropy_C + token))
    is_label = (row == tl.load(label_C + token)) & (tl.load(has_label_C + token) != 0)
    grad = tl.where(is_label, of_log_prob, 0.0) - tl.where(prob > 0.0, prob * factor, 0.0)
    tl.store(place, grad.to(logits_CV.dtype.element_ty), mask=row < num_rows)
