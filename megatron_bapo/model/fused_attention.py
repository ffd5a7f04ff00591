"""Transformer Engine's fused attention for packed sequences, including context parallelism.

Legend: T tokens of this context-parallel rank, H heads of this rank, G key/value heads of this rank, D head size, E
width of a head's value.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from megatron_bapo.errors import UserError
from megatron_bapo.model.packed_attention import PackedSequences, widened
from megatron_bapo.parallel.megatron import MegatronModule, TEDotProductAttention, TransformerConfig


class FusedAttention(MegatronModule):
    """Causal attention within each packed sequence (`core_attention` of Megatron's attention classes).

    Megatron passes one row of T tokens with rotary angles already applied by position, and Transformer Engine gets the
    boundaries of the sequences. Queries, keys and values of a rank are in zigzag order, which Transformer Engine calls
    dual-chunk swap. Latent attention's values are narrower than its keys and passed with zeros behind them, because
    only some of Transformer Engine's kernels take packed sequences of two widths.

    Its plain operators, which keep all scores [H, T, T], run only if NVTE_UNFUSED_ATTN=1 is set: they are several times
    slower, and Transformer Engine would choose them without a word where neither cuDNN nor flash-attn can run.
    """

    def __init__(self, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(config=config)
        os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
        if "k_channels" in settings:
            settings["v_channels"] = settings["k_channels"]
        self.attention: Any = TEDotProductAttention(config=config, **settings)

    def forward(
        self,
        query_T1HD: torch.Tensor,
        key_T1GD: torch.Tensor,
        value_T1GE: torch.Tensor,
        attention_mask: None,
        *,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSequences,
    ) -> torch.Tensor:
        """Return the attention output, [T, 1, H*E]."""
        query_THD, key_TGD, value_TGE = (x.flatten(0, -3) for x in (query_T1HD, key_T1GD, value_T1GE))
        try:
            out = self.attention(
                query_THD,
                key_TGD,
                widened(value_TGE, key_TGD.size(-1)),
                None,
                attn_mask_type=attn_mask_type,
                packed_seq_params=packed_seq_params.thd,
            )
        except ValueError as error:
            if "No dot product attention backend" not in str(error):
                raise
            raise UserError(
                f"model.transformer_impl=transformer_engine: neither cuDNN nor flash-attn computes attention of packed "
                f"sequences with heads of {query_THD.size(-1)} on this GPU; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints the "
                "reasons; install flash-attn, set transformer_impl=local, or accept slow operators with "
                "NVTE_UNFUSED_ATTN=1"
            ) from error
        return out.view(*query_THD.shape)[..., : value_TGE.size(-1)].reshape(out.size(0), 1, -1)
