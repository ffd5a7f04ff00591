"""FP8 through Transformer Engine: Megatron's settings for a recipe, and access to parameters that are stored in FP8.

Scoring and training run the same layers with the same rounding, so FP8 does not bias the ratios: Megatron enters the
FP8 context inside its transformer block, with or without gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_bapo.config.fp8 import Fp8Config
from megatron_bapo.parallel.megatron import dequantize_fp8_tensor, is_float8tensor

AMAX_HISTORY = 1024
"""Number of micro-batches whose maxima determine the scales of `delayed`, as in NVIDIA's recipes."""


def fp8_settings(fp8: Fp8Config | None) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig for an FP8 recipe."""
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
    """Return the values that the model computes with: the parameter, or its values in the model's dtype if in FP8."""
    parameter = parameter.detach()
    if not is_float8tensor(parameter):
        return parameter
    with torch.cuda.device_of(
        parameter
    ):  # Transformer Engine uses the current device of the thread, here a pool thread
        return dequantize_fp8_tensor(parameter)


def set_values(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor of the same shape into a parameter, rounded to the parameter's format."""
    if is_float8tensor(parameter):
        tensor = tensor.to(device=parameter.device, dtype=parameter.dtype)  # quantizers read device memory
    parameter.copy_(tensor)


def discard_fp8_copies(model: torch.nn.Module) -> None:
    """Free the FP8 copies of weights that Transformer Engine's modules keep from one micro-batch to the next.

    The first micro-batch of the next pass makes them again, because Megatron's schedule tells the modules that it is
    the first one (transformer_engine/pytorch/module/base.py, TE 2.20).
    """
    for module in model.modules():
        copies = getattr(module, "_fp8_workspaces", None)
        if copies is not None:
            copies.clear()
