"""Layer specs in plain torch: an RMSNorm that sequence parallelism accepts, and attention over packed sequences.

Legend: T packed tokens, H heads of this rank, G key/value heads of this rank, D head size, B sequences, L longest one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from megatron_bapo.parallel.megatron import (
    MegatronModule,
    PackedSeqParams,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_num_layers_to_build,
)


class RMSNorm(torch.nn.RMSNorm):
    """Megatron's own wrapper refuses sequence parallelism and does not tag its weight for the gradient sum."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence (`core_attention` of Megatron's SelfAttention).

    Sequences are laid out side by side as a padded batch, so that one causal kernel without a mask serves them all:
    with the padding behind the tokens, no real token attends to it.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)

    def forward(
        self,
        query_THD: torch.Tensor,
        key_TGD: torch.Tensor,
        value_TGD: torch.Tensor,
        attention_mask: None,
        *,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams,
    ) -> torch.Tensor:
        """The attention output, [T, H*D]."""
        num_tokens, num_heads, head_size = query_THD.shape
        cu_seqlens = packed_seq_params.cu_seqlens_q
        num_sequences, longest = cu_seqlens.numel() - 1, int(packed_seq_params.max_seqlen_q)
        lengths_B = cu_seqlens.diff()
        first_slots_B = torch.arange(num_sequences, device=cu_seqlens.device) * longest - cu_seqlens[:-1]
        slots_T = torch.arange(num_tokens, device=cu_seqlens.device) + torch.repeat_interleave(
            first_slots_B, lengths_B, output_size=num_tokens
        )

        def padded(x_TND: torch.Tensor) -> torch.Tensor:
            flat = x_TND.new_zeros(num_sequences * longest, x_TND.size(1), head_size).index_copy(0, slots_T, x_TND)
            x_BNLD = flat.view(num_sequences, longest, x_TND.size(1), head_size).transpose(1, 2)
            return x_BNLD.repeat_interleave(num_heads // x_TND.size(1), dim=1)

        out_BHLD = F.scaled_dot_product_attention(
            padded(query_THD), padded(key_TGD), padded(value_TGD), is_causal=True, scale=self.softmax_scale
        )
        return out_BHLD.transpose(1, 2).reshape(num_sequences * longest, -1).index_select(0, slots_T)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The spec of this pipeline stage's transformer block, without Transformer Engine."""
    spec: Any = get_gpt_layer_local_spec(
        num_experts=None, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    attention = layer.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    layers = [spec] * get_num_layers_to_build(config)
    norm: Any = RMSNorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
