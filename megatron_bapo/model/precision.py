"""FP8 through Transformer Engine: what Megatron is told of a recipe, and parameters that are kept in it.

Scoring and training take the same path through the same layers, so both round alike and ratios are not biased: Megatron
opens the FP8 context inside its transformer block, whether gradients are wanted or not.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_bapo.config.fp8 import Fp8Config
from megatron_bapo.parallel.megatron import dequantize_fp8_tensor, is_float8tensor

AMAX_HISTORY = 1024
"""Micro-batches from whose largest values `delayed` takes its scales, as in NVIDIA's own recipes."""


def fp8_settings(fp8: Fp8Config | None) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig."""
    if fp8 is None:
        return {}
    at_start, at_end = fp8.num_bf16_layers
    return {
        "fp8": fp8.number_format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.param,
        "fp8_amax_history_len": AMAX_HISTORY,
        "fp8_amax_compute_algo": "max",
        "first_last_layers_bf16": fp8.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": at_start,
        "num_layers_at_end_in_bf16": at_end,
    }


def values_of(parameter: torch.Tensor) -> torch.Tensor:
    """What the model multiplies by: the parameter itself or, kept in FP8, its values in the model's dtype."""
    parameter = parameter.detach()
    if not is_float8tensor(parameter):
        return parameter
    with torch.cuda.device_of(parameter):  # Transformer Engine takes the thread's current device, here a pool's thread
        return dequantize_fp8_tensor(parameter)


def set_values(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor of the parameter's shape into it, rounded as it is kept."""
    if is_float8tensor(parameter):
        tensor = tensor.to(device=parameter.device, dtype=parameter.dtype)  # quantisers read device memory
    parameter.copy_(tensor)
