"""From a Hugging Face `config.json` to Megatron-Core's TransformerConfig.

A field that this table does not know how to honour is refused by name, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.errors import UserError
from megatron_bapo.parallel.megatron import TransformerConfig


@dataclass(frozen=True)
class Family:
    """What distinguishes one model family from a plain pre-norm RMSNorm/SwiGLU/RoPE decoder."""

    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {"llama": Family(), "qwen2": Family(qkv_bias=True), "qwen3": Family(qk_norm=True)}

_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, 0.0, None),
}


@dataclass(frozen=True)
class Architecture:
    """A model's shape, in Hugging Face's names."""

    family: Family
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool


def read_architecture(model_path: Path) -> Architecture:
    """The architecture in `model_path/config.json`.

    Raises UserError for a missing file, a model family or a field value that the trainer does not support.
    """
    file = model_path / "config.json"
    if not file.is_file():
        raise UserError(f"{file} does not exist; model.path must be a Hugging Face checkpoint folder")
    config = json.loads(file.read_text())
    family = FAMILIES.get(config.get("model_type"))
    if family is None:
        raise UserError(
            f"{file}: model_type is {config.get('model_type')!r}; supported families are {', '.join(FAMILIES)}"
        )
    for field, allowed in _REQUIRED_VALUES.items():
        if field in config and config[field] not in allowed:
            raise UserError(
                f"{file}: {field} is {config[field]!r}, which the trainer does not support ({allowed[0]!r} is)"
            )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{file}: RoPE scaling {rope} is not supported; use a checkpoint without it")
    heads = config["num_attention_heads"]
    return Architecture(
        family=family,
        num_hidden_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def transformer_config(
    architecture: Architecture, parallel: ParallelConfig, dtype: torch.dtype, *, cpu_initialization: bool
) -> TransformerConfig:
    """Megatron's config of this model under this layout. `cpu_initialization` makes weights in host memory first."""
    recompute = (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if parallel.recompute_granularity == "full"
        else {}
    )
    return TransformerConfig(
        num_layers=architecture.num_hidden_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.intermediate_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_key_value_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.family.qkv_bias,
        qk_layernorm=architecture.family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=cpu_initialization,
        # Losses carry their own global denominator, so gradients are plain sums over micro-batches and ranks.
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length. Megatron ties this to the all-to-all dispatcher, dense models included.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recompute,
    )
