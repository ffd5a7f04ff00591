"""FLOPs of a model's passes over sequences (arXiv 2104.04473)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.planning.parameters import num_active_adapter_parameters, num_active_parameters

TRAINING_PASSES = 3
"""FLOPs of one forward and one backward pass, in forward passes."""
FROZEN_PASSES = 2
"""The same of a linear layer whose weight is frozen: its backward pass computes only the gradient of the input
(Megatron-Core's LinearWithFrozenWeight)."""


def forward_flops(architecture: Architecture, length: float, square: float) -> tuple[float, float]:
    """Return the forward FLOPs of one sequence as (linear layers, causal attention and recurrences).

    `length` is the mean length and `square` the mean square of the lengths, in tokens. The sums over several sequences
    give the FLOPs of all: both results are linear in them, or with windows nearly so. The output layer is counted at
    every token, as is usual, even though only response tokens need it.
    """
    attention = (
        2 * architecture.num_hidden_layers * architecture.attention_width * architecture.attended(length, square)
    )
    recurrences = len(architecture.linear_layers) * architecture.recurrence_flops * length
    return 2.0 * num_active_parameters(architecture) * length, attention + recurrences


def forward_pass_flops(architecture: Architecture, lengths: Sequence[int]) -> float:
    """Return the FLOPs of one forward pass over sequences of these lengths, in tokens."""
    return sum(forward_flops(architecture, sum(lengths), sum(length**2 for length in lengths)))


def training_flops(architecture: Architecture, length: float, square: float, lora: LoraConfig | None) -> float:
    """Return the FLOPs of one forward and backward pass over one sequence, with lengths as in `forward_flops`.

    With adapters all other weights are frozen. Attention itself has no weights, so that its gradients stay.
    """
    linear, attention = forward_flops(architecture, length, square)
    if lora is None:
        return TRAINING_PASSES * (linear + attention)
    adapters = 2.0 * num_active_adapter_parameters(architecture, lora) * length
    return FROZEN_PASSES * linear + TRAINING_PASSES * (attention + adapters)


def training_pass_flops(architecture: Architecture, lengths: Sequence[int], lora: LoraConfig | None) -> float:
    """Return the FLOPs of one forward and backward pass over sequences of these lengths, in tokens."""
    return training_flops(architecture, sum(lengths), sum(length**2 for length in lengths), lora)
