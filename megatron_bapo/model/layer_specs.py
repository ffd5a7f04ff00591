"""Layer specs: Megatron's local modules with our norm and packed attention, or Transformer Engine's fused modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.model.fused_attention import FusedAttention
from megatron_bapo.model.gated_attention import GatedAttention
from megatron_bapo.model.gated_delta_net import DeltaNetSubmodules, GatedDeltaNet
from megatron_bapo.model.latent_attention import LatentAttention
from megatron_bapo.model.packed_attention import PackedAttention
from megatron_bapo.parallel.megatron import (
    ColumnParallelLinear,
    ModuleSpec,
    RowParallelLinear,
    TEColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with sequence parallelism, which Megatron's wrapper rejects; tags the weight for the gradient sum."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class ZeroCenteredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by one plus its weight, in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).to(x.dtype)


def _norm(config: TransformerConfig) -> Any:
    return ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm


def _local_layer(config: TransformerConfig, num_experts: int | None) -> Any:
    spec: Any = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    norm = _norm(config)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    attention = _with_core_attention(spec, config, PackedAttention)
    if config.multi_latent_attention:
        attention.q_layernorm = attention.kv_layernorm = norm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    return spec


def _with_core_attention(spec: Any, config: TransformerConfig, core_attention: Any) -> Any:
    """Set the attention classes of a layer's spec and return the submodules of its attention."""
    attention = spec.submodules.self_attention
    if config.multi_latent_attention:
        attention.module = LatentAttention
    elif config.attention_output_gate:
        attention.module = GatedAttention
    attention.submodules.core_attention = core_attention
    return attention.submodules


def _transformer_engine_layer(config: TransformerConfig, num_experts: int | None) -> Any:
    """Return the spec with norms fused into the following linear layers and one grouped GEMM for a rank's experts."""
    spec: Any = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts,
        moe_grouped_gemm=True,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    _with_core_attention(spec, config, FusedAttention)
    return spec


def _layer_with_separate_linear(config: TransformerConfig, num_experts: int | None) -> Any:
    """Return the spec with Megatron's own linear layers, whose inputs adapters can read, and fused attention."""
    spec = _local_layer(config, num_experts)
    _with_core_attention(spec, config, FusedAttention)
    return spec


def _with_delta_net(spec: Any, *, fused_linear: bool, fused: bool) -> Any:
    """Replace the attention of a layer's spec by a Gated DeltaNet."""
    submodules = DeltaNetSubmodules(ColumnParallelLinear, RowParallelLinear)
    if fused and fused_linear:
        submodules = DeltaNetSubmodules(TEColumnParallelLinear, TERowParallelLinear)
        spec.submodules.input_layernorm = TENorm  # which attention has fused into its first linear layer
    spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=submodules)
    return spec


def block_spec(
    config: TransformerConfig, architecture: Architecture, layers: range, *, fused_linear: bool = True
) -> TransformerBlockSubmodules:
    """Return the spec of consecutive layers, whose numbers are those of the whole model, from 0.

    Without `fused_linear`, Transformer Engine's layers are used for attention only.
    """
    fused = config.transformer_impl == "transformer_engine"
    make_layer = _local_layer
    if fused:
        make_layer = _transformer_engine_layer if fused_linear else _layer_with_separate_linear

    def layer_spec(layer: int) -> Any:
        spec = make_layer(config, config.num_moe_experts if layer in architecture.moe_layers else None)
        if layer in architecture.linear_layers:
            return _with_delta_net(spec, fused_linear=fused_linear, fused=fused)
        return spec

    norm: Any = TENorm if fused else _norm(config)
    return TransformerBlockSubmodules(layer_specs=[layer_spec(layer) for layer in layers], layer_norm=norm)
