"""Effect of FP8 on memory and speed, in the trainer and in the engines."""

from __future__ import annotations

from dataclasses import replace

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.model_checks import EXPERT_BLOCK
from megatron_bapo.config.padding import round_up
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.hardware import Assumptions, Gpu
from megatron_bapo.planning.parameters import ChunkShape, Split, count_elements, stage_chunks, whole_model

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
FP8_BYTES = 1
BLACKWELL = 10
"""Major compute capability."""


def quantised_elements(config: Config, architecture: Architecture, stage: int) -> int:
    """Return the elements of the weights that one rank of a pipeline stage multiplies in FP8."""
    if config.fp8 is None:
        return 0
    at_start, at_end = config.fp8.num_bf16_layers
    last = architecture.num_hidden_layers - at_end
    chunks = (chunk.layers for chunk in stage_chunks(architecture, config.parallel, stage))
    in_fp8 = (range(max(layers.start, at_start), min(layers.stop, last)) for layers in chunks)
    shapes = tuple(ChunkShape(layers, has_embedding=False, has_output=False) for layers in in_fp8)
    return count_elements(architecture, Split.of(config.parallel), shapes).matrices


def fp8_speedup(gpu: Gpu, assumptions: Assumptions) -> float:
    """Return the speedup of FP8 over bfloat16 matrix products, quantization included; at least 1."""
    fp8 = gpu.fp8_tflops * assumptions.fp8_efficiency
    return max(1.0, fp8 / (gpu.bf16_tflops * assumptions.compute_efficiency))


def engine_architecture(config: Config, architecture: Architecture, gpu: Gpu) -> Architecture:
    """Return the architecture with experts as wide as vLLM allocates them in an engine.

    vLLM 0.32 rounds their width for quantization in blocks (quantization/online/fp8.py), and for the unquantized
    kernels that it prefers on Blackwell and that compute only SiLU (fused_moe/oracle/unquantized.py).
    """
    rollout = config.rollout
    on_blackwell = gpu.capability[0] == BLACKWELL and not architecture.family.clamped_swiglu
    if rollout.quantization is None and not on_blackwell:
        return architecture
    width = round_up(architecture.moe_intermediate_size, EXPERT_BLOCK * rollout.ranks_per_expert)
    return replace(architecture, moe_intermediate_size=width)


def engine_weight_bytes(config: Config, architecture: Architecture, num_parameters: int) -> int:
    """Return the weight bytes of an engine rank with `num_parameters` parameters.

    With quantization, embeddings and norms stay in the model's dtype.
    """
    dtype = DTYPE_BYTES[config.model.dtype]
    if config.rollout.quantization is None:
        return num_parameters * dtype
    elements = count_elements(architecture, Split(), (whole_model(architecture),))
    share = elements.matrices / elements.total
    return int(num_parameters * (share * FP8_BYTES + (1.0 - share) * dtype))


def engine_matrix_bytes(config: Config) -> int:
    """Return the bytes of one element of a linear layer's weights in an engine."""
    return DTYPE_BYTES[config.model.dtype] if config.rollout.quantization is None else FP8_BYTES


def key_value_bytes(config: Config) -> int:
    """Return the bytes of one element of an engine's KV cache."""
    return DTYPE_BYTES[config.model.dtype] if config.rollout.kv_cache_dtype == "auto" else FP8_BYTES


def engine_speedup(config: Config, gpu: Gpu, assumptions: Assumptions) -> float:
    """Return the speedup of an engine's linear layers over bfloat16."""
    return 1.0 if config.rollout.quantization is None else fp8_speedup(gpu, assumptions)
