"""Gated DeltaNet (arXiv 2412.06464), the layers of Qwen3-Next and Qwen3.5 that are no attention.

Megatron-Core's module needs flash-linear-attention, whose kernels only run on GPUs. In 0.16.1 it has neither packed
sequences nor context parallelism (megatron/core/ssm/gated_delta_net.py); 0.19.2 has both, packed only with the kernels.

A key head, with its queries, its value heads and their gates, is independent of all others until the output projection.
Tensor-parallel ranks have some of the key heads each, and context-parallel ranks exchange tokens for key heads, so that
each has some heads of whole sequences. Legend as in `packed_attention.py`, with K key heads of this rank, R value heads
per key head, D width of a key, E width of a value, W outputs of the input projection per key head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_bapo.model.delta_rule import gated_delta_rule
from megatron_bapo.model.packed_attention import AttentionBatch, PackedSequences
from megatron_bapo.parallel.megatron import (
    MegatronModule,
    TransformerConfig,
    all_to_all,
    copy_to_tensor_model_parallel_region,
)


@dataclass(frozen=True)
class DeltaNetSubmodules:
    """Classes of the linear layers, Megatron's or Transformer Engine's."""

    in_proj: Any
    out_proj: Any


class GatedDeltaNet(MegatronModule):
    """A layer's Gated DeltaNet, in the place of its attention.

    `in_proj` computes for each key head a query, a key, R values, R gates, R betas and R decays, in this order.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        *,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.tensor_group, self.context_group = pg_collection.tp, pg_collection.cp
        settings: Any = config  # whose fields of linear attention may be None
        heads, value_heads = settings.linear_num_key_heads, settings.linear_num_value_heads
        self.key_dim, self.value_dim = settings.linear_key_head_dim, settings.linear_value_head_dim
        self.num_heads, self.ratio = heads // self.tensor_group.size(), value_heads // heads
        self.mixed = 2 * self.key_dim + self.ratio * self.value_dim
        width = self.mixed + self.ratio * (self.value_dim + 2)
        linear: dict[str, Any] = {
            "config": config,
            "bias": False,
            "skip_bias_add": True,
            "is_expert": False,
            "tp_group": self.tensor_group,
        }
        self.in_proj = submodules.in_proj(
            config.hidden_size, heads * width, init_method=config.init_method, gather_output=False, **linear
        )
        self.out_proj = submodules.out_proj(
            value_heads * self.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **linear,
        )
        of_heads, kernel = self.num_heads * self.ratio, settings.linear_conv_kernel_dim
        self.conv1d = self._parameter(self.num_heads * self.mixed, 1, kernel)
        self.dt_bias, self.A_log = self._parameter(of_heads), self._parameter(of_heads)
        # Every tensor-parallel rank has it whole; `_gated` sums its gradient over them.
        self.norm = torch.nn.Parameter(torch.ones(self.value_dim, dtype=config.params_dtype))

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        """Return a parameter that tensor-parallel ranks have different parts of, to be loaded."""
        parameter: Any = torch.nn.Parameter(torch.zeros(shape, dtype=self.config.params_dtype))
        parameter.tensor_model_parallel = True
        return parameter

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None, *, packed_seq_params: PackedSequences, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of the layer for this rank's tokens and no bias, as Megatron's attention does."""
        projected_T1W, _ = self.in_proj(hidden_states)
        x_UKW, packed = projected_T1W[:, 0].unflatten(-1, (self.num_heads, -1)), packed_seq_params
        if packed.shared is not None:
            x_UKW = x_UKW.index_select(0, packed.shared.token_U)
        size = self.context_group.size()
        # [rank, token, head, ...]: the tokens of a batch are the same slice of every rank's part.
        x_RUKW = _heads_for_tokens(x_UKW, self.context_group).unflatten(0, (size, -1))
        recompute = self.training and self.config.recompute_granularity == "selective"
        recompute = recompute and "core_attn" in (self.config.recompute_modules or ())
        outputs = []
        for batch in packed.batches:
            x_SKW = x_RUKW[:, batch.tokens].flatten(0, 1)
            out = checkpoint(self._mix, x_SKW, batch, use_reentrant=False) if recompute else self._mix(x_SKW, batch)
            outputs.append(out.unflatten(0, (size, -1)))
        out_UKV = _tokens_for_heads(torch.cat(outputs, dim=1).flatten(0, 1), self.context_group)
        if packed.shared is not None:
            out_UKV = out_UKV.index_select(0, packed.shared.first_T)
        return self.out_proj(out_UKV.flatten(1)[:, None])

    def _mix(self, x_SKW: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the gated output [S, K, R*E] of whole sequences for this rank's key heads."""
        x_BLKW = _padded(x_SKW, batch)
        widths = [self.mixed, self.ratio * self.value_dim, self.ratio, self.ratio]
        mixed, gate, beta, decay = x_BLKW.split(widths, dim=-1)
        query, key, value = self._convolved(mixed).split(
            [self.key_dim, self.key_dim, self.ratio * self.value_dim], dim=-1
        )
        A_log_KR, dt_bias_KR = self._own(self.A_log), self._own(self.dt_bias)
        # [B, L, K, R, ...] -> [B, L, K*R, ...]: a query and a key for each value head.
        query, key = (_normalized(x).repeat_interleave(self.ratio, dim=2) for x in (query, key))
        value, gate = (x.unflatten(-1, (self.ratio, -1)).flatten(2, 3) for x in (value, gate))
        log_decay = -A_log_KR.float().exp() * F.softplus(decay.float() + dt_bias_KR.float())
        out = gated_delta_rule(query, key, value, log_decay.flatten(2), beta.float().sigmoid().flatten(2))
        out = self._gated(out, gate).unflatten(2, (-1, self.ratio)).flatten(3).flatten(0, 1)
        return out if batch.key_slots is None else out.index_select(0, batch.key_slots)

    def _own(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the rows [K, rows of a key head, ...] of a parameter that belong to this context-parallel rank."""
        return weight.unflatten(0, (self.num_heads, -1)).chunk(self.context_group.size())[self.context_group.rank()]

    def _convolved(self, x_BLKC: torch.Tensor) -> torch.Tensor:
        weight = self._own(self.conv1d)
        num_channels, kernel = weight.size(0) * weight.size(1), weight.size(-1)
        out = F.conv1d(x_BLKC.flatten(2).mT, weight.flatten(0, 1), padding=kernel - 1, groups=num_channels)[
            ..., : x_BLKC.size(1)
        ]
        return F.silu(out).mT.unflatten(2, (weight.size(0), -1))

    def _gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weight = copy_to_tensor_model_parallel_region(self.norm, group=self.tensor_group)
        normalized = F.rms_norm(x.float(), (self.value_dim,), eps=self.config.layernorm_epsilon).to(x.dtype)
        return (weight * normalized * F.silu(gate.float())).to(x.dtype)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    """Return vectors of length 1, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def _padded(x_S: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """Return the padded batch [B, L, ...] of tokens that are in the order of the ranks."""
    num_slots = batch.num_sequences * batch.longest
    if batch.key_slots is not None:
        x_S = x_S.new_zeros(num_slots, *x_S.shape[1:]).index_copy(0, batch.key_slots, x_S)
    return x_S.unflatten(0, (batch.num_sequences, -1))


def _heads_for_tokens(x_TK: torch.Tensor, group: Any) -> torch.Tensor:
    """Return this rank's heads of all ranks' tokens, rank by rank, from all heads of this rank's tokens."""
    if group.size() == 1:
        return x_TK
    return all_to_all(group, x_TK.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1))


def _tokens_for_heads(x_SK: torch.Tensor, group: Any) -> torch.Tensor:
    """Return all heads of this rank's tokens, from this rank's heads of all ranks' tokens."""
    if group.size() == 1:
        return x_SK
    return all_to_all(group, x_SK).unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)
