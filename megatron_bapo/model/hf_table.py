"""The table of the model's parameters: how Megatron and Hugging Face name them, and how ranks split them.

Names are those of Megatron's local layer specs and of its Transformer Engine specs, and of the modules of this project
that replace some of Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.model.layer_parts import (
    has_attention,
    has_compressed_queries,
    has_delta_net,
    has_expert_biases,
    has_experts,
    has_grouped_attention,
    has_grouped_projections,
    has_latent_attention,
    has_latent_queries_of_hidden,
    has_linear_biases,
    has_own_output,
    has_qk_norm,
    has_qkv_bias,
    has_router,
    has_router_bias,
    has_separate_projections,
    has_shared_expert,
    has_sinks,
    is_dense,
)
from megatron_bapo.model.row_layouts import Layout, Piece, evenly, key_heads, query_key_value, vocabulary


@dataclass(frozen=True)
class Row:
    """One row of the table: a Megatron parameter and its Hugging Face tensors."""

    megatron: tuple[str, ...]
    """Name in the local specs and, if it differs, in the Transformer Engine specs, without `decoder.layers.N.`."""
    hugging_face: tuple[tuple[str, str], ...]
    """(name, dims) of each tensor; a dim is a name in `lengths` or a number."""
    layout: Layout | None = None
    """Split of the parameter; None means that every rank of the tensor axis has the whole tensor."""
    dim: int = 0
    """Dim that the layout splits."""
    axis: Literal["tensor", "expert_tensor"] = "tensor"
    """Mesh axis over which the layout splits the parameter."""
    is_in: Callable[[Architecture, int], bool] = lambda _arch, _layer: True
    """Whether a layer of a model has the parameter."""
    is_frozen: bool = False
    """Whether training leaves the parameter as it is; it is in fp32 whatever the model's dtype."""
    parts: tuple[int, ...] | None = None
    """Parts of the layout that are the tensors of `hugging_face`; None: all. Rows of other parts are zero."""

    def pieces(self, arch: Architecture, rank: int, num_ranks: int) -> list[Piece]:
        """Return the pieces of one rank, whose parts count the tensors of `hugging_face`."""
        assert self.layout is not None, f"{self.megatron[0]} is not split"
        pieces = self.layout(arch, rank, num_ranks)
        if self.parts is None:
            return pieces
        return [replace(piece, part=self.parts.index(piece.part)) for piece in pieces if piece.part in self.parts]

    def local_length(self, arch: Architecture, num_ranks: int) -> int:
        """Return the length of the split dim on each rank, with the rows of parts that are no tensors."""
        assert self.layout is not None, f"{self.megatron[0]} is not split"
        return sum(piece.size for piece in self.layout(arch, 0, num_ranks))

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.megatron[0]

    @property
    def is_in_layers(self) -> bool:
        return "{layer}" in self.hugging_face[0][0]


_L = "model.layers.{layer}."
_ATTENTION = _L + "self_attn."
_LINEAR = _L + "linear_attn."
_CORE_ATTENTION = "self_attention.core_attention."
_EXPERT = _L + "mlp.experts.{expert}."
_LOCAL_EXPERT = "mlp.experts.local_experts.{expert}."


def _shared_expert(name: str) -> tuple[Row, Row]:
    """Return the rows of the expert that every token passes; families call it by different names."""
    prefix, is_in = f"{_L}mlp.{name}.", partial(has_shared_expert, name)
    return (
        Row(
            ("mlp.shared_experts.linear_fc1.weight",),
            ((prefix + "gate_proj.weight", "shared_mlp hidden"), (prefix + "up_proj.weight", "shared_mlp hidden")),
            partial(evenly, "shared_mlp", 2),
            is_in=is_in,
        ),
        Row(
            ("mlp.shared_experts.linear_fc2.weight",),
            ((prefix + "down_proj.weight", "hidden shared_mlp"),),
            partial(evenly, "shared_mlp", 1),
            dim=1,
            is_in=is_in,
        ),
    )


_LATENT_ATTENTION = (
    Row(
        ("self_attention.linear_q_proj.weight",),
        ((_ATTENTION + "q_proj.weight", "queries hidden"),),
        partial(evenly, "queries", 1),
        is_in=has_latent_queries_of_hidden,
    ),
    Row(
        ("self_attention.linear_q_down_proj.weight",),
        ((_ATTENTION + "q_a_proj.weight", "q_rank hidden"),),
        is_in=has_compressed_queries,
    ),
    Row(
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        ((_ATTENTION + "q_a_layernorm.weight", "q_rank"),),
        is_in=has_compressed_queries,
    ),
    Row(
        ("self_attention.linear_q_up_proj.weight",),
        ((_ATTENTION + "q_b_proj.weight", "queries q_rank"),),
        partial(evenly, "queries", 1),
        is_in=has_compressed_queries,
    ),
    Row(
        ("self_attention.linear_kv_down_proj.weight",),
        ((_ATTENTION + "kv_a_proj_with_mqa.weight", "kv_and_rotated hidden"),),
        is_in=has_latent_attention,
    ),
    Row(
        ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
        ((_ATTENTION + "kv_a_layernorm.weight", "kv_rank"),),
        is_in=has_latent_attention,
    ),
    Row(
        ("self_attention.linear_kv_up_proj.weight",),
        ((_ATTENTION + "kv_b_proj.weight", "keys_and_values kv_rank"),),
        partial(evenly, "keys_and_values", 1),
        is_in=has_latent_attention,
    ),
)
"""Rows of multi-head latent attention (DeepSeek-V3)."""

_DELTA_NET = (
    Row(
        ("self_attention.in_proj.weight",),
        ((_LINEAR + "in_proj_qkvz.weight", "linear_qkvz hidden"), (_LINEAR + "in_proj_ba.weight", "linear_ba hidden")),
        key_heads(("projections",), ("pairs",)),
        is_in=has_grouped_projections,
    ),
    Row(
        ("self_attention.in_proj.weight",),
        (
            (_LINEAR + "in_proj_qkv.weight", "linear_qkv hidden"),
            (_LINEAR + "in_proj_z.weight", "linear_values hidden"),
            (_LINEAR + "in_proj_b.weight", "linear_value_heads hidden"),
            (_LINEAR + "in_proj_a.weight", "linear_value_heads hidden"),
        ),
        key_heads(("key", "key", "values"), ("values",), ("scalars",), ("scalars",)),
        is_in=has_separate_projections,
    ),
    Row(
        ("self_attention.conv1d",),
        ((_LINEAR + "conv1d.weight", "linear_qkv 1 linear_kernel"),),
        key_heads(("key", "key", "values")),
        is_in=has_delta_net,
    ),
    Row(
        ("self_attention.dt_bias",),
        ((_LINEAR + "dt_bias", "linear_value_heads"),),
        partial(evenly, "linear_value_heads", 1),
        is_in=has_delta_net,
    ),
    Row(
        ("self_attention.A_log",),
        ((_LINEAR + "A_log", "linear_value_heads"),),
        partial(evenly, "linear_value_heads", 1),
        is_in=has_delta_net,
    ),
    Row(("self_attention.norm",), ((_LINEAR + "norm.weight", "linear_value"),), is_in=has_delta_net),
    Row(
        ("self_attention.out_proj.weight",),
        ((_LINEAR + "out_proj.weight", "hidden linear_values"),),
        partial(evenly, "linear_values", 1),
        dim=1,
        is_in=has_delta_net,
    ),
)
"""Rows of Gated DeltaNet (Qwen3-Next, Qwen3.5)."""

EMBEDDING, OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"
TABLE = (
    Row(("embedding.word_embeddings.weight",), ((EMBEDDING, "vocab hidden"),), vocabulary),
    Row(("decoder.final_layernorm.weight",), (("model.norm.weight", "hidden"),)),
    Row(
        ("output_layer.weight",),
        ((OUTPUT_LAYER, "vocab hidden"),),
        vocabulary,
        is_in=has_own_output,
    ),
    Row(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ((_L + "input_layernorm.weight", "hidden"),),
    ),
    Row(
        ("self_attention.linear_qkv.weight",),
        (
            (_ATTENTION + "q_proj.weight", "queries hidden"),
            (_ATTENTION + "k_proj.weight", "keys hidden"),
            (_ATTENTION + "v_proj.weight", "keys hidden"),
        ),
        query_key_value,
        is_in=has_grouped_attention,
    ),
    Row(
        ("self_attention.linear_qkv.bias",),
        (
            (_ATTENTION + "q_proj.bias", "queries"),
            (_ATTENTION + "k_proj.bias", "keys"),
            (_ATTENTION + "v_proj.bias", "keys"),
        ),
        query_key_value,
        is_in=has_qkv_bias,
    ),
    *_DELTA_NET,
    Row(("self_attention.q_layernorm.weight",), ((_ATTENTION + "q_norm.weight", "head"),), is_in=has_qk_norm),
    Row(("self_attention.k_layernorm.weight",), ((_ATTENTION + "k_norm.weight", "head"),), is_in=has_qk_norm),
    *_LATENT_ATTENTION,
    Row(
        ("self_attention.linear_proj.weight",),
        ((_ATTENTION + "o_proj.weight", "hidden values"),),
        partial(evenly, "values", 1),
        dim=1,
        is_in=has_attention,
    ),
    Row(("self_attention.linear_proj.bias",), ((_ATTENTION + "o_proj.bias", "hidden"),), is_in=has_linear_biases),
    Row(
        (_CORE_ATTENTION + "softmax_offset", _CORE_ATTENTION + "attention.softmax_offset"),
        ((_ATTENTION + "sinks", "heads"),),
        partial(evenly, "heads", 1),
        is_in=has_sinks,
    ),
    Row(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ((_L + "post_attention_layernorm.weight", "hidden"),),
    ),
    Row(
        ("mlp.linear_fc1.weight",),
        ((_L + "mlp.gate_proj.weight", "mlp hidden"), (_L + "mlp.up_proj.weight", "mlp hidden")),
        partial(evenly, "mlp", 2),
        is_in=is_dense,
    ),
    Row(
        ("mlp.linear_fc2.weight",),
        ((_L + "mlp.down_proj.weight", "hidden mlp"),),
        partial(evenly, "mlp", 1),
        dim=1,
        is_in=is_dense,
    ),
    Row(
        ("mlp.router.weight",),
        ((_L + "mlp.gate.weight", "experts hidden"),),
        is_in=partial(has_router, "gate"),
    ),
    Row(
        ("mlp.router.weight",),
        ((_L + "mlp.router.weight", "experts hidden"),),
        is_in=partial(has_router, "router"),
    ),
    Row(("mlp.router.bias",), ((_L + "mlp.router.bias", "experts"),), is_in=has_expert_biases),
    Row(
        (_LOCAL_EXPERT + "linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
        ((_EXPERT + "gate_proj.weight", "expert_mlp hidden"), (_EXPERT + "up_proj.weight", "expert_mlp hidden")),
        partial(evenly, "expert_mlp", 2),
        axis="expert_tensor",
        is_in=has_experts,
    ),
    Row(
        (_LOCAL_EXPERT + "linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
        ((_EXPERT + "down_proj.weight", "hidden expert_mlp"),),
        partial(evenly, "expert_mlp", 1),
        dim=1,
        axis="expert_tensor",
        is_in=has_experts,
    ),
    Row(
        (_LOCAL_EXPERT + "linear_fc1.bias", "mlp.experts.linear_fc1.bias{expert}"),
        ((_EXPERT + "gate_proj.bias", "expert_mlp"), (_EXPERT + "up_proj.bias", "expert_mlp")),
        partial(evenly, "expert_mlp", 2),
        axis="expert_tensor",
        is_in=has_expert_biases,
    ),
    Row(
        (_LOCAL_EXPERT + "linear_fc2.bias", "mlp.experts.linear_fc2.bias{expert}"),
        ((_EXPERT + "down_proj.bias", "hidden"),),
        axis="expert_tensor",
        is_in=has_expert_biases,
    ),
    *_shared_expert("shared_expert"),
    Row(
        ("mlp.shared_experts.gate_weight",),
        ((_L + "mlp.shared_expert_gate.weight", "1 hidden"),),
        is_in=partial(has_shared_expert, "shared_expert"),
    ),
    *_shared_expert("shared_experts"),
    # Frozen rows are the last ones, so that files have them behind all other tensors.
    Row(
        ("mlp.router.expert_bias",),
        ((_L + "mlp.gate.e_score_correction_bias", "experts"),),
        is_in=has_router_bias,
        is_frozen=True,
    ),
)

Table = tuple[Row, ...]
TRAINED_TABLE = tuple(row for row in TABLE if not row.is_frozen)
"""Rows of the tensors that training changes."""
