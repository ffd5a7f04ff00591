"""Log-probs and entropy over a vocabulary that is split across tensor-parallel ranks.

Legend: T packed tokens, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_bapo.parallel.groups import Axis


def _reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, axis: Axis) -> torch.Tensor:
    if axis.size > 1:
        dist.all_reduce(tensor, op=op, group=axis.group)
    return tensor


class _LogProbsAndEntropy(torch.autograd.Function):
    """One softmax serves log-prob, entropy and the log-prob's gradient; the entropy has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits_TV: torch.Tensor, labels_T: torch.Tensor, temperature: float, axis: Axis
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits_TV = logits_TV.float() / temperature
        max_T = _reduce(logits_TV.amax(-1), dist.ReduceOp.MAX, axis)
        logits_TV -= max_T[:, None]
        vocab_size = logits_TV.size(1)
        local_T = labels_T - axis.rank * vocab_size
        owned_T = (local_T >= 0) & (local_T < vocab_size)
        local_T = local_T.clamp(0, vocab_size - 1)
        label_logit_T = logits_TV.gather(1, local_T[:, None]).squeeze(1) * owned_T
        softmax_TV = logits_TV.exp()
        sums = torch.stack([softmax_TV.sum(-1), label_logit_T, torch.einsum("tv,tv->t", softmax_TV, logits_TV)])
        sum_exp_T, label_logit_T, weighted_T = _reduce(sums, dist.ReduceOp.SUM, axis)
        softmax_TV /= sum_exp_T[:, None]
        ctx.save_for_backward(softmax_TV, local_T, owned_T)
        ctx.temperature = temperature
        log_z_T = sum_exp_T.log()
        entropy_T = log_z_T - weighted_T / sum_exp_T
        ctx.mark_non_differentiable(entropy_T)
        return label_logit_T - log_z_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax_TV, local_T, owned_T = ctx.saved_tensors
        grad_T = grads[0] / ctx.temperature
        grad_TV = softmax_TV * -grad_T[:, None]
        grad_TV.scatter_add_(1, local_T[:, None], (grad_T * owned_T)[:, None])
        return grad_TV, None, None, None


def log_probs_and_entropy(
    logits_TV: torch.Tensor, labels_T: torch.Tensor, *, temperature: float, tensor_axis: Axis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each label and entropy of each distribution, in nats, float32 [T] each.

    `logits_TV` is this rank's slice of the vocabulary, before the temperature; both results are equal on all ranks of
    the axis. The gradient flows through the log-probs only: d log p(y)/d logits = (1[y] - softmax) / temperature.
    """
    return _LogProbsAndEntropy.apply(logits_TV, labels_T, temperature, tensor_axis)  # pyright: ignore[reportReturnType]
