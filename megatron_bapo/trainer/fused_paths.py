"""Reports the fused kernels of a trainer rank and checks the project's own Triton kernels on its device."""

from __future__ import annotations

import logging

import torch

from megatron_bapo.algorithm.loss_tokens import LossTokens
from megatron_bapo.algorithm.policy_loss import policy_loss
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.model.vocab_parallel import OutputLayer, token_loss
from megatron_bapo.parallel.collectives import max_over
from megatron_bapo.parallel.groups import Axis, ParallelGroups
from megatron_bapo.parallel.platform import local_device, runs_triton
from megatron_bapo.trainer.optimizer import Optimizer

KERNEL_TOLERANCE = 1e-4
"""Allowed difference relative to the largest element. Both paths compute in float32 on logits from the same matrix
product; gradients of lower precision may be rounded differently."""
NUM_ROWS, VOCAB_SIZE = 4160, 4100
"""Sizes of the check: more than one kernel block, with padding rows after the vocabulary."""

log = logging.getLogger(__name__)


def fused_paths(model: PolicyModel, optimizer: Optimizer, *, fused_kernels: bool) -> dict[str, str]:
    """Return the implementation in use for each operation, read from the objects that run it."""
    modules = [module for chunk in model.chunks for module in chunk.gpt.modules()]
    norms = {f"{type(m).__module__.split('.')[0]} {type(m).__name__}" for m in modules if "Norm" in type(m).__name__}
    return {
        "Adam": optimizer.adam_name,
        "norms": " and ".join(sorted(norms)),
        "log-probs, entropy and loss": "Triton" if fused_kernels else "torch",
    }


def kernels_work(groups: ParallelGroups, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels run on every rank's device and agree with torch's operators; log a warning otherwise.

    The check is specific to the model's dtype, because each dtype compiles to different kernels. Collective: all ranks
    use the same path.
    """
    if not runs_triton():
        return False
    problem = kernel_problem(dtype)
    if problem is not None:
        log.warning("Triton kernels do not work on %s, using torch operators instead: %s", local_device(), problem)
    broken = torch.tensor(float(problem is not None), device=local_device())
    max_over(groups.tensor, groups.data_context, groups.pipeline)(broken)
    return broken.item() == 0.0


def kernel_problem(dtype: torch.dtype) -> str | None:
    """Compute a small loss and its gradients with the kernels on this device and describe what fails, if anything."""
    expected = _small_loss(dtype, fused=False)
    try:
        found = _small_loss(dtype, fused=True)
    except Exception as error:  # compilers and drivers may raise anything; torch is the fallback
        return f"{type(error).__name__}: {error}"
    for name, ours in found.items():
        limit = max(KERNEL_TOLERANCE, 2 * torch.finfo(ours.dtype).eps)
        error = (ours - expected[name]).abs().max() / expected[name].abs().max()
        if not error <= limit:
            return f"{name} differs by {error:.1e} of its largest element, more than {limit:.0e}"
    return None


def _small_loss(dtype: torch.dtype, *, fused: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(local_device())

    # Multiples of 1/4 make the logits independent of the summation order of the matrix product.
    hidden_TH, weight_VH = (
        normal(num, 32).mul_(4).round_().div_(4).to(dtype).requires_grad_() for num in (16, NUM_ROWS)
    )
    labels_T = torch.arange(VOCAB_SIZE - 16, VOCAB_SIZE, device=local_device())
    tokens = LossTokens(-normal(16).abs(), normal(16), normal(16).abs())
    low, high = torch.tensor([0.8, 1.2], device=local_device())
    settings = AlgorithmConfig(entropy_coeff=0.1)
    # An axis of size 1 calls no collective, so it needs no group.
    alone = Axis(None, rank=0, size=1)  # pyright: ignore[reportArgumentType]
    loss, log_probs_T, entropy_T = token_loss(
        hidden_TH,
        OutputLayer(weight_VH, VOCAB_SIZE, alone, chunk_size=16, fused=fused),
        labels_T,
        lambda log_probs_C, entropy_C, chunk: policy_loss(
            log_probs_C, entropy_C, tokens[chunk], low, high, settings, fused=fused
        ),
        temperature=0.7,
        entropy_requires_grad=True,
    )
    gradients = torch.autograd.grad(loss, (hidden_TH, weight_VH))
    names = ("loss", "log-probs", "entropy", "gradient by hidden states", "gradient by the output layer")
    return dict(zip(names, (loss.detach(), log_probs_T, entropy_T, *gradients), strict=True))
