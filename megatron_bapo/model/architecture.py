"""Builds Megatron-Core's TransformerConfig and the rotary frequencies from an architecture and a parallel layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.fp8 import Fp8Config
from megatron_bapo.config.linear_attention_fields import LINEAR_SIZES
from megatron_bapo.config.model import ModelConfig
from megatron_bapo.config.pipeline_layers import chunk_layers
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.precision import fp8_settings
from megatron_bapo.parallel.megatron import MLATransformerConfig, TransformerConfig, quick_gelu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    architecture: Architecture,
    model: ModelConfig,
    parallel: ParallelConfig,
    fp8: Fp8Config | None,
    *,
    on_gpu: bool,
) -> TransformerConfig:
    """Return Megatron's config of a model under a parallel layout.

    On a GPU the weights are initialized there, and SwiGLU is Megatron's compiled function, which saves only its input.
    """
    dtype, fused = DTYPES[model.dtype], model.transformer_impl == "transformer_engine"
    kind = MLATransformerConfig if architecture.kv_lora_rank else TransformerConfig
    settings: dict[str, Any] = dict(
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
        add_bias_linear=architecture.family.linear_biases,
        add_qkv_bias=architecture.family.qkv_bias,
        qk_layernorm=architecture.family.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        softmax_scale=rotary(architecture)[1] ** 2 / math.sqrt(architecture.head_dim),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not on_gpu,
        # Losses are normalized over the global minibatch, so gradients are summed over micro-batches and ranks.
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length. Megatron requires the all-to-all dispatcher for this, even for dense
        # models.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # A stage frees its output when it has sent it; the backward pass needs only its gradient. With virtual stages
        # Megatron frees it while it is being sent (`overlap_p2p_comm`), and gloo then sends what is written there next.
        deallocate_pipeline_outputs=parallel.virtual_pipeline_model_parallel_size == 1,
        transformer_impl=model.transformer_impl,
        apply_rope_fusion=fused,
        bias_activation_fusion=on_gpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **_layout(architecture, parallel),
        **_experts(architecture, grouped=fused and model.lora is None),
        **fp8_settings(fp8),
    )
    settings |= _latent_attention(architecture) | _sinks_and_windows(architecture) | _swiglu(architecture)
    settings |= _delta_nets(architecture)
    return kind(**settings)


def _layout(architecture: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "cp_comm_type": parallel.cp_comm_type,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
    }
    if parallel.virtual_pipeline_model_parallel_size > 1:
        # With two stages, one batch would contain several sends and receives between the same two ranks.
        settings |= {
            "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    chunks = chunk_layers(architecture, parallel)
    if len({len(layers) for layers in chunks}) > 1:
        settings["pipeline_model_parallel_layout"] = _chunk_contents(chunks)
    if parallel.recompute_granularity == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif parallel.recompute_granularity == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": list(parallel.recompute_modules)}
    return settings


def _chunk_contents(chunks: Sequence[range]) -> list[list[str]]:
    """Return what each model chunk computes, in Megatron's words."""
    contents = [["decoder"] * len(layers) for layers in chunks]
    contents[0].insert(0, "embedding")
    contents[-1].append("loss")
    return contents


def _experts(architecture: Architecture, *, grouped: bool) -> dict[str, Any]:
    """Return the mixture-of-experts settings, without auxiliary losses.

    Qwen's models compute the softmax over all experts and, with `norm_topk_prob`, divide the selected weights by their
    sum. This equals the softmax over the logits of the selected experts, which is Megatron's router without
    `moe_router_pre_softmax`. Routers with a sigmoid choose experts by their score plus a bias and weight them by their
    score without it, divided by the sum of the selected ones.
    """
    if not architecture.moe_layers:
        return {}
    sigmoid, grouped_choice = architecture.family.sigmoid_router, architecture.topk_group < architecture.n_group
    return {
        "num_moe_experts": architecture.num_experts,
        "moe_ffn_hidden_size": architecture.moe_intermediate_size,
        "moe_layer_freq": [int(layer in architecture.moe_layers) for layer in range(architecture.num_hidden_layers)],
        "moe_router_topk": architecture.num_experts_per_tok,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_pre_softmax": not sigmoid and not architecture.norm_topk_prob,
        "moe_router_num_groups": architecture.n_group if grouped_choice else None,
        "moe_router_group_topk": architecture.topk_group if grouped_choice else None,
        "moe_router_topk_scaling_factor": scale if (scale := architecture.routed_scaling_factor) != 1 else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": grouped,
        "moe_shared_expert_intermediate_size": architecture.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": architecture.family.shared_expert_gate,
    }


def _latent_attention(architecture: Architecture) -> dict[str, Any]:
    """Return the settings of multi-head latent attention.

    Megatron's class scales the softmax by YaRN's factor for all dimensions, and reads from its rotary embedding
    (`LatentRotaryEmbedding`) the factor of the rotated ones. Its fused kernel for RoPE needs an embedding of its own.
    """
    if not architecture.kv_lora_rank:
        return {}
    rope = architecture.rope_scaling
    return {
        "q_lora_rank": architecture.q_lora_rank or None,
        "kv_lora_rank": architecture.kv_lora_rank,
        "qk_head_dim": architecture.qk_nope_head_dim,
        "qk_pos_emb_head_dim": architecture.qk_rope_head_dim,
        "v_head_dim": architecture.v_head_dim,
        "qk_layernorm": True,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        "apply_rope_fusion": False,
    }


def _sinks_and_windows(architecture: Architecture) -> dict[str, Any]:
    """Return the settings of attention sinks, and of layers that attend to a window.

    Megatron and Transformer Engine count the tokens before the query's own.
    """
    settings: dict[str, Any] = {"softmax_type": "learnable"} if architecture.family.attention_sinks else {}
    if architecture.sliding_window:
        layers = range(architecture.num_hidden_layers)
        settings["window_size"] = (architecture.sliding_window - 1, 0)
        settings["window_attn_skip_freq"] = [int(architecture.window(layer) is not None) for layer in layers]
    return settings


def _delta_nets(architecture: Architecture) -> dict[str, Any]:
    """Return the settings of models whose layers are mostly a Gated DeltaNet, for `GatedDeltaNet` and Megatron."""
    if not architecture.linear_layers:
        return {}
    return {
        "attention_output_gate": architecture.family.output_gate,
        "layernorm_zero_centered_gamma": architecture.family.zero_centered_norms,
        **{name: getattr(architecture, name) for name in LINEAR_SIZES},
    }


def _swiglu(architecture: Architecture) -> dict[str, Any]:
    """Return the settings of gpt-oss's SwiGLU.

    Megatron's compiled function would clamp before it adds the bias of a linear layer (`weighted_bias_quick_geglu_impl`
    in fused_bias_geglu.py, Megatron-Core 0.16.1 and 0.19.2).
    """
    if not architecture.family.clamped_swiglu:
        return {}
    return {
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "bias_activation_fusion": False,
    }


def rotary(architecture: Architecture) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies, float32 [rotary_dim / 2], and the factor for cosine and sine.

    Scaled rope types use the functions of transformers. Except in latent attention, all dimensions of a head rotate
    with them, so multiplying the softmax scale by the square of the factor is equivalent to multiplying queries and
    keys by the factor.
    """
    base, dim = architecture.rope_theta, architecture.rotary_dim
    if not architecture.rope_scaling:
        return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)), 1.0
    # Most models have no scaling, and importing transformers takes more than a second in every trainer rank.
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = ("hidden_size", "num_attention_heads", "max_position_embeddings")
    shape = {name: getattr(architecture, name) for name in names} | {"head_dim": architecture.rotary_dim}
    config = PreTrainedConfig(
        **shape,
        rope_parameters={"rope_theta": base, **architecture.rope_scaling},  # pyright: ignore[reportCallIssue]
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[architecture.rope_scaling["rope_type"]](config)
    return frequencies.float(), float(factor)
