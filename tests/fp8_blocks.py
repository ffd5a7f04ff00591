"""Block-wise FP8 weights: blocks of 128 x 128 with one float32 scale each, as in vLLM and DeepSeek checkpoints.

A matrix [N, K] becomes `weight`, e4m3 [N, K], and `weight_scale_inv` [ceil(N / 128), ceil(K / 128)]; a value is the
product of its number and the scale of its block. The last blocks of a ragged edge are smaller. vLLM quantizes in this
way at each weight update under `rollout.quantization: fp8_per_block`, where each engine rank quantizes its part of the
weights (per_block_cast_to_fp8 in vllm/utils/deep_gemm.py, vLLM 0.32). Tests compare such weights with those of this
module.
"""

from __future__ import annotations

import torch

BLOCK = 128
LARGEST = 448.0
"""Largest value of e4m3 without infinities."""
SMALLEST_AMAX = 1e-4
"""Lower limit of a block's absolute maximum, which avoids a division by zero."""


def scale_shape(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a matrix."""
    return -(-num_rows // BLOCK), -(-num_columns // BLOCK)


def quantise(weight_NK: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix to (e4m3 [N, K], float32 scales [ceil(N / 128), ceil(K / 128)]).

    `power_of_two` rounds scales up to powers of two, which E8M0 scales and mxfp8 require; rounding up clips nothing.
    """
    num_rows, num_columns = weight_NK.shape
    scales = _amax(weight_NK) / LARGEST
    if power_of_two:
        # Round the bit patterns, because the rounding of logarithms depends on the device.
        scales = (scales.view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32)
    scaled = weight_NK.float() * _spread(1.0 / scales, num_rows, num_columns)
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def dequantise(weight_NK: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the values as float32 [N, K]."""
    assert tuple(scales.shape) == scale_shape(*weight_NK.shape), (
        f"scales {list(scales.shape)} do not fit a matrix {list(weight_NK.shape)}"
    )
    return weight_NK.float() * _spread(scales, *weight_NK.shape)


def _amax(weight_NK: torch.Tensor) -> torch.Tensor:
    num_rows, num_columns = weight_NK.shape
    rows, columns = scale_shape(num_rows, num_columns)
    padding = (0, columns * BLOCK - num_columns, 0, rows * BLOCK - num_rows)
    blocks = torch.nn.functional.pad(weight_NK, padding).view(rows, BLOCK, columns, BLOCK)
    return blocks.abs().amax(dim=(1, 3)).float().clamp(min=SMALLEST_AMAX)


def _spread(scales: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Expand the scales so that each element has the scale of its block, [N, K]."""
    return scales.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :num_columns]
