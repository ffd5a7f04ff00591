"""Policy loss from hidden states: `token_loss` against the straightforward output layer, softmax, gather and backward.

Bytes are counted at full size, 8192 tokens and a vocabulary of 151,936, on tensors without data, because the
straightforward version would take 16 GB. Time is measured with fewer tokens, in two chunks so that it includes the cost
of chunking. Hidden size and vocabulary are Qwen2.5-0.5B's, in float32. At TP 1 one process has both threads; at TP 2
each of two gloo ranks has one thread and half of the vocabulary.

The straightforward version is plain PyTorch at TP 1, and at TP 2 one softmax for log-prob, entropy and gradient. Both
differentiate only the log-probs. Gradients count as bytes, inputs and the weight do not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.spawn import spawn
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.live_bytes import count_live_bytes
from bench.report import medians_s, option_parser, report
from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.model.vocab_parallel import OutputLayer, token_loss
from megatron_bapo.parallel.groups import Axis

VOCAB_SIZE, HIDDEN_SIZE = 151_936, 896
NUM_TOKENS, NUM_TIMED_TOKENS, CHUNK_SIZE = 8192, 1536, 1024
TENSOR_PARALLEL_SIZES = (1, 2)
NUM_THREADS = 2
NUM_REPEATS = 3


class _OneSoftmax(torch.autograd.Function):
    """Log-probs and entropy from the logits of a split vocabulary; saves the softmax for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
        max_T = logits_TV.amax(-1)
        dist.all_reduce(max_T, dist.ReduceOp.MAX, group=axis.group)
        logits_TV = logits_TV - max_T[:, None]
        num_rows = logits_TV.size(1)
        local_T = labels_T - axis.rank * num_rows
        owned_T = (local_T >= 0) & (local_T < num_rows)
        local_T = local_T.clamp(0, num_rows - 1)
        label_logit_T = logits_TV.gather(1, local_T[:, None]).squeeze(1) * owned_T
        softmax_TV = logits_TV.exp()
        sums = torch.stack([softmax_TV.sum(-1), label_logit_T, logits_TV.mul_(softmax_TV).sum(-1)])
        dist.all_reduce(sums, group=axis.group)
        sum_exp_T, label_logit_T, weighted_T = sums
        softmax_TV /= sum_exp_T[:, None]
        ctx.save_for_backward(softmax_TV, local_T, owned_T)
        entropy_T = sum_exp_T.log() - weighted_T / sum_exp_T
        ctx.mark_non_differentiable(entropy_T)
        return label_logit_T - sum_exp_T.log(), entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        softmax_TV, local_T, owned_T = ctx.saved_tensors
        grad_TV = softmax_TV * -grads[0][:, None]
        grad_TV.scatter_add_(1, local_T[:, None], (grads[0] * owned_T)[:, None])
        return grad_TV, None, None


def plain_log_probs(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, axis: Axis) -> Tensor:
    """Return the log-probs; also compute the entropy without gradient, and keep no tensor longer than necessary."""
    if axis.size > 1:
        results: Any = _OneSoftmax.apply(F.linear(hidden_TH, weight_VH), labels_T, axis)
        return results[0]
    all_log_probs_TV = torch.log_softmax(F.linear(hidden_TH, weight_VH), -1)
    with torch.no_grad():
        all_log_probs_TV.exp().mul_(all_log_probs_TV).sum(-1).neg_()
    return all_log_probs_TV.gather(1, labels_T[:, None]).squeeze(1)


def make_tasks(num_tokens: int, axis: Axis) -> dict[str, Callable[[], object]]:
    """Return tasks that compute the loss and both gradients of one micro-batch, by version."""
    torch.manual_seed(0)
    hidden_TH = torch.randn(num_tokens, HIDDEN_SIZE, requires_grad=True)
    weight_VH = torch.randn(VOCAB_SIZE // axis.size, HIDDEN_SIZE).mul_(HIDDEN_SIZE**-0.5).requires_grad_()
    labels_T = torch.randint(VOCAB_SIZE, (num_tokens,))
    loss_tokens = LossTokens(
        torch.full((num_tokens,), -12.0), torch.randn(num_tokens), torch.full((num_tokens,), 1 / num_tokens)
    )
    low, high, settings = torch.tensor(0.8), torch.tensor(1.2), AlgorithmConfig()

    def loss_of(log_probs_C: Tensor, entropy_C: Tensor, tokens: slice) -> Tensor:
        return policy_loss(log_probs_C, entropy_C, loss_tokens[tokens], low, high, settings)

    def backward(loss: Tensor) -> None:
        hidden_TH.grad = weight_VH.grad = None
        loss.backward()

    def straightforward() -> None:
        log_probs_T = plain_log_probs(hidden_TH, weight_VH, labels_T, axis)
        backward(loss_of(log_probs_T, log_probs_T, slice(None)))

    def chunked() -> None:
        layer = OutputLayer(weight_VH, VOCAB_SIZE, axis, CHUNK_SIZE)
        backward(token_loss(hidden_TH, layer, labels_T, loss_of, temperature=1.0)[0])

    return {"straightforward": straightforward, "chunked": chunked}


def peak_bytes(tensor_parallel_size: int) -> dict[str, float]:
    """Return each version's peak on one rank at full size, with fake tensors and fake collectives."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tensor_parallel_size)
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    with FakeTensorMode():
        tasks = make_tasks(NUM_TOKENS, Axis(group, 0, tensor_parallel_size))
        peaks = {name: float(count_live_bytes(task).peak) for name, task in tasks.items()}
    dist.destroy_process_group()
    return peaks


def _time_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(NUM_THREADS // size)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    times = medians_s(make_tasks(NUM_TIMED_TOKENS, Axis(group, rank, size)), num_repeats=NUM_REPEATS)
    if rank == 0:
        torch.save(times, f"{folder}/times.pt")
    dist.destroy_process_group()


def times_s(tensor_parallel_size: int) -> dict[str, float]:
    """Return each version's median seconds on rank 0, measured in newly started ranks."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(partial(_time_rank, size=tensor_parallel_size, folder=folder), nprocs=tensor_parallel_size)
        return torch.load(Path(folder) / "times.pt")


def main() -> None:
    rows, ratios, figures = [], {}, {}
    for size in TENSOR_PARALLEL_SIZES:
        peaks, times = peak_bytes(size), times_s(size)
        for name, peak in peaks.items():
            rows.append((size, name, peak / 2**30, times[name]))
            figures |= {f"{name}_peak_gib_tp{size}": peak / 2**30, f"{name}_s_tp{size}": times[name]}
        ratios |= {
            f"peak_bytes_tp{size}": peaks["chunked"] / peaks["straightforward"],
            f"time_tp{size}": times["chunked"] / times["straightforward"],
        }
    columns = ("TP", "version", f"peak GiB per rank, {NUM_TOKENS} tokens", f"seconds, {NUM_TIMED_TOKENS} tokens")
    report("log_probs", columns, rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
