"""Weights as FP8 numbers in blocks of 128 x 128 with one float32 scale each: what vLLM and DeepSeek's checkpoints hold.

A matrix [N, K] becomes `weight`, e4m3 [N, K], and `weight_scale_inv` [ceil(N / 128), ceil(K / 128)]; the product of a
number and its block's scale is the value. The last blocks of a ragged edge are smaller. vLLM quantises so at each sync
under `rollout.quantization: fp8_per_block`, its weights' part of each engine rank on its own (per_block_cast_to_fp8 in
vllm/utils/deep_gemm.py, vLLM 0.32); here is the same for those who prepare such weights, or check them.
"""

from __future__ import annotations

import torch

BLOCK = 128
LARGEST = 448.0
"""Of e4m3 without infinities."""
SMALLEST_AMAX = 1e-4
"""A block of zeros, or of less than this, is scaled as if it held this, and not divided by zero."""


def scale_shape(num_rows: int, num_columns: int) -> tuple[int, int]:
    return -(-num_rows // BLOCK), -(-num_columns // BLOCK)


def quantise(weight_NK: torch.Tensor, *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [N, K], float32 scales [ceil(N / 128), ceil(K / 128)]).

    `power_of_two` rounds scales up to powers of two, which E8M0 scales and mxfp8 can hold; nothing is clipped by it.
    """
    num_rows, num_columns = weight_NK.shape
    scales = _amax(weight_NK) / LARGEST
    if power_of_two:
        # By their bits: logarithms are rounded, and by other devices otherwise.
        scales = (scales.view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32)
    scaled = weight_NK.float() * _spread(1.0 / scales, num_rows, num_columns)
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def dequantise(weight_NK: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [N, K]."""
    assert tuple(scales.shape) == scale_shape(*weight_NK.shape), f"scales {list(scales.shape)} of another matrix"
    return weight_NK.float() * _spread(scales, *weight_NK.shape)


def _amax(weight_NK: torch.Tensor) -> torch.Tensor:
    num_rows, num_columns = weight_NK.shape
    rows, columns = scale_shape(num_rows, num_columns)
    padding = (0, columns * BLOCK - num_columns, 0, rows * BLOCK - num_rows)
    blocks = torch.nn.functional.pad(weight_NK, padding).view(rows, BLOCK, columns, BLOCK)
    return blocks.abs().amax(dim=(1, 3)).float().clamp(min=SMALLEST_AMAX)


def _spread(scales: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
    """Each block's scale at each of its places, [N, K]."""
    return scales.repeat_interleave(BLOCK, 0)[:num_rows].repeat_interleave(BLOCK, 1)[:, :num_columns]
