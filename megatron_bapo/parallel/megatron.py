"""The only module of the project that imports Megatron-Core (`megatron`).

It installs the CPU replacements if there is no GPU and then re-exports what the project uses. Differences between
Megatron-Core 0.16.1 (the CPU lock) and 0.19 (the GPU lock) are handled here.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_bapo.parallel import megatron_on_cpu, platform


@contextmanager
def _without_wandb() -> Iterator[None]:
    """Let imports of wandb fail, which Megatron-Core handles: they take two seconds in every trainer rank.

    Megatron-Core 0.16 and 0.19 import it for their inference engines, which this project does not use.
    """
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["wandb"]


def _load_cudnn() -> None:
    """Load torch's cuDNN, all its parts, before Transformer Engine looks for one.

    Beside a CUDA toolkit Transformer Engine prefers a cuDNN of the system (transformer_engine/common/__init__.py, TE
    2.20). Parts of two versions do not work together: either its import fails, or its fused attention.
    """
    folder = Path(torch.__file__).parents[1] / "nvidia" / "cudnn"
    if "CUDNN_HOME" in os.environ or not folder.is_dir():
        return
    os.environ["CUDNN_HOME"] = str(folder)
    for library in sorted(folder.glob("lib/libcudnn*.so.*")):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


if not platform.has_gpu():
    megatron_on_cpu.install()
if platform.has_transformer_engine():
    _load_cudnn()

with warnings.catch_warnings(), _without_wandb():
    warnings.simplefilter("ignore")  # apex and Transformer Engine may be missing; the preflight reports them
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TEDotProductAttention,
        TENorm,
        TERowParallelLinear,
    )
    from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.mappings import (
        all_to_all,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.utils import is_layer_window_attention

# Megatron-Core 0.16.1 calls collectives by names that are deprecated in torch 2.13.
warnings.filterwarnings("ignore", r".torch\.distributed\.\w+. is deprecated", FutureWarning)
logging.getLogger("megatron").setLevel(logging.WARNING)
# Megatron-Core 0.19 logs for every model chunk that GPTModel gets no new features.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)

__all__ = [
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "Float16Module",
    "GPTModel",
    "HybridDeviceOptimizer",
    "MLASelfAttention",
    "MLATransformerConfig",
    "MegatronModule",
    "ModuleSpec",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "PackedSeqParams",
    "RowParallelLinear",
    "SelfAttention",
    "TEColumnParallelLinear",
    "TEDotProductAttention",
    "TENorm",
    "TERowParallelLinear",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "all_to_all",
    "clip_grad_by_total_norm_fp32",
    "copy_to_tensor_model_parallel_region",
    "dequantize_fp8_tensor",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_cuda_rng_tracker",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_megatron_optimizer",
    "is_float8tensor",
    "is_layer_window_attention",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "quick_gelu",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "thd_sequences",
]

_PACKED_FIELDS = {field.name for field in dataclasses.fields(PackedSeqParams)}


def thd_sequences(starts: torch.Tensor, longest: int) -> PackedSeqParams:
    """Return the parameters of packed sequences for Transformer Engine's attention (layout thd).

    `starts` (int32) has the index of the first token of each sequence followed by the total number of tokens, counted
    over all context-parallel ranks. Padding after the tokens of a sequence belongs to the sequence. Megatron-Core 0.19
    can state that there is no padding between sequences; otherwise Transformer Engine reads the device to find out.
    """
    more: dict[str, Any] = {"pad_between_seqs": False} if "pad_between_seqs" in _PACKED_FIELDS else {}
    return PackedSeqParams(
        qkv_format="thd",  # pyright: ignore[reportArgumentType]
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        cu_seqlens_q_padded=starts,
        cu_seqlens_kv_padded=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **more,
    )
