"""Log-probs, entropy and losses from hidden states, over a vocabulary that is split across tensor-parallel ranks.

The output layer is applied to one chunk of tokens at a time, so a tensor of all tokens times the vocabulary never
exists. `token_loss` computes the gradient of a chunk in the forward pass, while its softmax is in memory, as Liger's
fused linear losses do (arXiv 2410.10989). `log_probs_and_entropy` recomputes the chunk in the backward pass and works
with any loss. Both cost one collective per chunk, of four numbers per token. The computation on the logits of one rank
is a `VocabShard`: torch operators here, Triton kernels in `vocab_kernels.py`.

Legend: T tokens, C tokens of a chunk, H hidden size, V this rank's rows of the output layer, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bapo.model.vocab_shard import PADDING_LOGIT, KeptTokens, Softmax, VocabShard, keep_only
from megatron_bapo.parallel.groups import Axis

TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""(log-probs [C], entropy [C], slice of the T tokens) -> their term of a loss that is a sum over tokens, 0-d.

Gradients flow only to the first two arguments.
"""


@dataclass(frozen=True)
class OutputLayer:
    """This rank's rows of the output layer and how to apply them.

    All ranks have equally many rows. Rows with a global index of at least `vocab_size` are padding, with probability
    and gradient 0. A larger `chunk_size` (tokens) uses more memory and fewer kernels.
    """

    weight_VH: Tensor
    vocab_size: int
    tensor_axis: Axis
    chunk_size: int
    fused: bool = False
    """Whether Triton kernels compute the softmax and its gradient."""
    kept: KeptTokens | None = None
    """Tokens to which the distributions of the T tokens are restricted; None: the whole vocabulary."""

    @property
    def num_valid_rows(self) -> int:
        """Number of rows on this rank that are not padding."""
        num_rows = len(self.weight_VH)
        return min(max(self.vocab_size - self.tensor_axis.rank * num_rows, 0), num_rows)


def log_probs_and_entropy(
    hidden_TH: Tensor, layer: OutputLayer, labels_T: Tensor, *, temperature: float, entropy_requires_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each label and the entropy of each distribution, in nats, float32 [T], equal on all ranks.

    Both are differentiable with respect to the hidden states and the weight; the backward pass applies the output layer
    again. The gradient of the hidden states is this rank's term of a sum over the tensor axis. Labels must be less than
    `layer.vocab_size`.
    """
    results: Any = _LogProbsAndEntropy.apply(
        hidden_TH, layer.weight_VH, layer, labels_T, temperature, entropy_requires_grad
    )
    return results


def token_loss(
    hidden_TH: Tensor,
    layer: OutputLayer,
    labels_T: Tensor,
    loss_of: TokenLoss,
    *,
    temperature: float,
    entropy_requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, 0-d, and the log-probs and entropy [T] as in `log_probs_and_entropy`, but without gradients.

    The loss is differentiable once, with respect to the hidden states and the weight. Its gradients are computed before
    this function returns, and the backward pass scales them in place. If no gradients are needed, `loss_of` is called
    once for all tokens.
    """
    needs_grad = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden_TH, layer.weight_VH))
    loss = torch.zeros((), device=hidden_TH.device)

    def gradients_of(log_probs_C: Tensor, entropy_C: Tensor, tokens: slice) -> tuple[Tensor, ...]:
        nonlocal loss
        log_probs_C = log_probs_C.detach().requires_grad_()
        entropy_C = entropy_C.detach().requires_grad_(entropy_requires_grad)
        with torch.enable_grad():
            share = loss_of(log_probs_C, entropy_C, tokens)
        loss = loss + share.detach()
        variables = (log_probs_C, entropy_C) if entropy_requires_grad else (log_probs_C,)
        return torch.autograd.grad(share, variables, materialize_grads=True)

    if not any(needs_grad):
        log_probs_T, entropy_T, *_ = _run(hidden_TH, layer, labels_T, temperature)
        return loss_of(log_probs_T, entropy_T, slice(0, len(labels_T))), log_probs_T, entropy_T
    log_probs_T, entropy_T, *gradients = _run(hidden_TH, layer, labels_T, temperature, gradients_of, needs_grad)
    result: Any = _WithGradients.apply(hidden_TH, layer.weight_VH, loss, *gradients)
    return result, log_probs_T, entropy_T


class _WithGradients(torch.autograd.Function):
    """A loss with precomputed gradients."""

    @staticmethod
    def forward(ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, loss: Tensor, *gradients: Tensor | None) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (gradient if gradient is None else gradient.mul_(grads[0]) for gradient in ctx.saved_tensors)
        return *scaled, None, None, None


class _LogProbsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        layer: OutputLayer,
        labels_T: Tensor,
        temperature: float,
        entropy_requires_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        log_probs_T, entropy_T, *_ = _run(hidden_TH, layer, labels_T, temperature)
        ctx.save_for_backward(hidden_TH, weight_VH, labels_T)
        ctx.layer, ctx.temperature, ctx.entropy_requires_grad = layer, temperature, entropy_requires_grad
        if not entropy_requires_grad:
            ctx.mark_non_differentiable(entropy_T)
        return log_probs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, _, labels_T = ctx.saved_tensors
        wanted = grads[: 1 + ctx.entropy_requires_grad]
        *_, grad_hidden_TH, grad_weight_VH = _run(
            hidden_TH,
            ctx.layer,
            labels_T,
            ctx.temperature,
            lambda _log_probs, _entropy, tokens: tuple(grad_T[tokens] for grad_T in wanted),
            ctx.needs_input_grad[:2],
        )
        return grad_hidden_TH, grad_weight_VH, None, None, None, None


@torch.no_grad()
def _run(
    hidden_TH: Tensor,
    layer: OutputLayer,
    labels_T: Tensor,
    temperature: float,
    gradients_of: Callable[[Tensor, Tensor, slice], tuple[Tensor, ...]] | None = None,
    needs_grad: tuple[bool, ...] = (False, False),
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute log-probs, entropy and the needed gradients of hidden states and weight, chunk by chunk.

    `gradients_of` takes the arguments of a `TokenLoss` and returns the gradients [C] of the loss by the log-probs and,
    optionally, by the entropy.
    """
    weight_VH, num_tokens = layer.weight_VH, len(hidden_TH)
    log_probs_T, entropy_T = torch.empty(2, num_tokens, device=hidden_TH.device)
    shard = _shard_of(layer, min(layer.chunk_size, num_tokens))
    grad_hidden_TH = torch.empty_like(hidden_TH) if needs_grad[0] else None
    grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_grad[1] else None
    first_row, num_rows = layer.tensor_axis.rank * len(weight_VH), len(weight_VH)
    places = None if layer.kept is None else layer.kept.places(first_row, num_rows, hidden_TH.device)
    for start in range(0, num_tokens, layer.chunk_size):
        tokens = slice(start, min(start + layer.chunk_size, num_tokens))
        kept = None if places is None else places.of(tokens)
        softmax = _softmax(shard, hidden_TH[tokens], layer, labels_T[tokens], temperature, kept)
        log_probs_T[tokens], entropy_T[tokens] = softmax.log_prob_C, softmax.entropy_C
        if gradients_of is not None:
            by_results = gradients_of(softmax.log_prob_C, softmax.entropy_C, tokens)
            grad_CV = shard.grad_logits(softmax, *(grad_C / temperature for grad_C in by_results))
            if grad_hidden_TH is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[tokens])
            if grad_weight_VH is not None:
                _multiply(grad_CV.T, hidden_TH[tokens], grad_weight_VH, add=True)
            del grad_CV  # the next chunk's logits take its memory
    if grad_weight_VH is not None:
        grad_weight_VH = grad_weight_VH.to(weight_VH.dtype)
    return log_probs_T, entropy_T, grad_hidden_TH, grad_weight_VH


def _multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Multiply into a float32 result; a product of lower-precision factors is rounded to their dtype first."""
    if left.dtype == out.dtype:
        out.addmm_(left, right, beta=float(add))
    elif add:
        out.add_(left @ right)
    else:
        out.copy_(left @ right)


def _shard_of(layer: OutputLayer, num_tokens: int) -> VocabShard:
    if not layer.fused:
        return _PlainShard(layer, num_tokens)
    from megatron_bapo.model.vocab_kernels import FusedShard  # Triton need not be installed

    return FusedShard(layer.weight_VH, layer.num_valid_rows, num_tokens)


def _softmax(
    shard: VocabShard,
    hidden_CH: Tensor,
    layer: OutputLayer,
    labels_C: Tensor,
    temperature: float,
    kept: tuple[Tensor, Tensor] | None,
) -> Softmax:
    """Compute the softmax of a chunk; one collective gathers each shard's maximum, log-sum, entropy and label logit.

    The total entropy is the entropy of the probabilities of the shards plus the entropies within the shards, weighted
    by these probabilities.
    """
    num_rows, axis = len(layer.weight_VH), layer.tensor_axis
    label_C = labels_C - axis.rank * num_rows
    has_label_C = (label_C >= 0) & (label_C < num_rows)
    label_C = label_C.clamp_(0, num_rows - 1)
    own_4C = shard.sums(hidden_CH, label_C, temperature, kept)
    own_max_C = own_4C[0].clone()
    own_4C[3] *= has_label_C
    max_RC, log_sum_RC, entropy_RC, label_logit_RC = _gather(own_4C, axis).unbind(1)
    max_C = max_RC.amax(0)
    log_sum_RC = log_sum_RC + (max_RC - max_C)
    log_sum_C = log_sum_RC.logsumexp(0)
    share_RC = (log_sum_RC - log_sum_C).exp()
    return Softmax(
        log_scale_C=own_max_C - max_C - log_sum_C,
        label_C=label_C,
        has_label_C=has_label_C,
        log_prob_C=label_logit_RC.sum(0) - max_C - log_sum_C,
        entropy_C=(share_RC * entropy_RC + torch.special.entr(share_RC)).sum(0),
    )


def _gather(own: Tensor, axis: Axis) -> Tensor:
    """Gather every rank's tensor, [R, ...]."""
    if axis.size == 1:
        return own[None]
    gathered = own.new_empty(axis.size, *own.shape)
    dist.all_gather(list(gathered), own, group=axis.group)
    return gathered


class _PlainShard:
    """`VocabShard` of torch operators in float32; stores exp(x) and x exp(x) of the logits x minus their maximum."""

    def __init__(self, layer: OutputLayer, num_tokens: int) -> None:
        self._weight_VH, self._num_valid_rows = layer.weight_VH, layer.num_valid_rows
        # Allocated once: on a CPU, fresh memory costs as much as the computation.
        self._memory_2CV = torch.empty(2, num_tokens, len(layer.weight_VH), device=layer.weight_VH.device)

    def sums(
        self, hidden_CH: Tensor, label_C: Tensor, temperature: float, kept: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        logits_CV, exp_CV = self._memory_2CV[:, : len(hidden_CH)].unbind()
        _multiply(hidden_CH, self._weight_VH.T, logits_CV)
        if temperature != 1.0:
            logits_CV.div_(temperature)
        logits_CV[:, self._num_valid_rows :] = PADDING_LOGIT
        if kept is not None:
            keep_only(logits_CV, kept)
        label_logit_C = logits_CV.gather(1, label_C[:, None]).squeeze(1)
        max_C = logits_CV.amax(-1)
        x_CV = logits_CV.sub_(max_C[:, None])
        torch.exp(x_CV, out=exp_CV)
        x_exp_CV = x_CV.mul_(exp_CV)  # not a dot product, whose running sum loses precision
        sum_C = exp_CV.sum(-1)
        return torch.stack([max_C, sum_C.log(), sum_C.log() - x_exp_CV.sum(-1) / sum_C, label_logit_C])

    def grad_logits(self, softmax: Softmax, grad_log_prob_C: Tensor, grad_entropy_C: Tensor | None = None) -> Tensor:
        x_exp_CV, exp_CV = self._memory_2CV[:, : len(softmax.label_C)].unbind()
        scale_C = softmax.log_scale_C.exp()
        if grad_entropy_C is None:
            grad_CV = exp_CV.mul_((-scale_C * grad_log_prob_C)[:, None])
        else:
            of_exp_C = grad_log_prob_C + grad_entropy_C * (softmax.log_scale_C + softmax.entropy_C)
            grad_CV = exp_CV.mul_((-scale_C * of_exp_C)[:, None])
            grad_CV.addcmul_(x_exp_CV, (-scale_C * grad_entropy_C)[:, None])
        grad_CV.scatter_add_(1, softmax.label_C[:, None], (grad_log_prob_C * softmax.has_label_C)[:, None])
        return grad_CV.to(self._weight_VH.dtype)
