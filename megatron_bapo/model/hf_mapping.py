"""Mapping between Hugging Face tensors and Megatron parameters under tensor and expert parallelism.

One table serves both import and export, for the module names of Megatron's local layer specs and of its Transformer
Engine specs. Import applies the pieces of a row's layout from the Hugging Face tensor to the local one, export in the
opposite direction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, Protocol

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.model.layer_parts import (
    has_compressed_queries,
    has_expert_biases,
    has_experts,
    has_grouped_attention,
    has_latent_attention,
    has_latent_queries_of_hidden,
    has_linear_biases,
    has_own_output,
    has_qk_norm,
    has_qkv_bias,
    has_router,
    has_router_bias,
    has_shared_expert,
    has_sinks,
    is_dense,
)
from megatron_bapo.model.row_layouts import Layout, Piece, evenly, lengths, query_key_value, vocabulary

if TYPE_CHECKING:
    import torch  # the rollout service imports this file without it

Shape = tuple[int, ...]


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

TABLE = (
    Row(("embedding.word_embeddings.weight",), (("model.embed_tokens.weight", "vocab hidden"),), vocabulary),
    Row(("decoder.final_layernorm.weight",), (("model.norm.weight", "hidden"),)),
    Row(
        ("output_layer.weight",),
        (("lm_head.weight", "vocab hidden"),),
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
    Row(("self_attention.q_layernorm.weight",), ((_ATTENTION + "q_norm.weight", "head"),), is_in=has_qk_norm),
    Row(("self_attention.k_layernorm.weight",), ((_ATTENTION + "k_norm.weight", "head"),), is_in=has_qk_norm),
    *_LATENT_ATTENTION,
    Row(
        ("self_attention.linear_proj.weight",),
        ((_ATTENTION + "o_proj.weight", "hidden values"),),
        partial(evenly, "values", 1),
        dim=1,
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


class Tensors(Protocol):
    """Parameters of one rank that a table maps to Hugging Face tensors: a model, or its adapters."""

    @property
    def architecture(self) -> Architecture: ...

    @property
    def table(self) -> Table: ...

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the parameters by their names from `global_name`."""
        ...


_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
_EXPERT_NUMBER = re.compile(r"(mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)")


def global_name(parameter_name: str, layer_offset: int, expert_offset: int) -> str:
    """Return a parameter's name with layer and expert numbers of the whole model.

    Megatron counts layers from 0 in every model chunk and experts from 0 on every expert-parallel rank. The offsets are
    the number of layers in earlier chunks and the number of experts on earlier ranks.
    """
    layer = _LAYER.fullmatch(parameter_name)
    if layer is None:
        return parameter_name
    rest = _EXPERT_NUMBER.sub(lambda match: f"{match[1]}{int(match[2]) + expert_offset}{match[3]}", layer[3])
    return f"{layer[1]}{int(layer[2]) + layer_offset}.{rest}"


@dataclass(frozen=True)
class Entry:
    """Table row of one parameter, with layer and expert numbers filled in."""

    row: Row
    names: tuple[str, ...]
    """Hugging Face names of the tensors in the row."""
    layer: int = 0
    expert: int = 0

    def shapes(self, arch: Architecture) -> list[Shape]:
        """Return the shapes of the Hugging Face tensors."""
        sizes = lengths(arch)
        return [
            tuple(int(dim) if dim.isdecimal() else sizes[dim] for dim in dims.split())
            for _, dims in self.row.hugging_face
        ]

    def local_shape(self, arch: Architecture, num_ranks: int) -> Shape:
        """Return the shape of the parameter on each of the ranks over which the layout splits it."""
        shape = list(self.shapes(arch)[0])
        if self.row.layout is vocabulary:
            shape[0] = arch.padded_vocab_size(num_ranks) // num_ranks
        elif self.row.layout is not None:
            shape[self.row.dim] = self.row.local_length(arch, num_ranks)
        return tuple(shape)


def _entry(row: Row, layer: int, expert: int) -> Entry:
    names = tuple(name.format(layer=layer, expert=expert) for name, _ in row.hugging_face)
    return Entry(row, names, layer, expert)


@lru_cache
def _by_name(table: Table) -> dict[str, list[Row]]:
    """Return the rows of each Megatron name. Rows with the same name are those of different families."""
    found: dict[str, list[Row]] = {}
    for row in table:
        for name in row.megatron:
            found.setdefault(name, []).append(row)
    return found


def lookup(name: str, arch: Architecture, table: Table = TABLE) -> Entry:
    """Return the table entry of a model's parameter, given its name from `global_name`."""
    layer = _LAYER.fullmatch(name)
    expert = _EXPERT_NUMBER.fullmatch(layer[3]) if layer else None
    rows = _by_name(table).get(f"{expert[1]}{{expert}}{expert[3]}" if expert else layer[3] if layer else name, ())
    number = int(layer[2]) if layer else 0
    row = next((row for row in rows if len(rows) == 1 or row.is_in(arch, number)), None)
    assert row is not None, f"no row in model/hf_mapping.py for the parameter {name}"
    return _entry(row, number, int(expert[2]) if expert else 0)


def entries(arch: Architecture, table: Table = TABLE) -> Iterator[Entry]:
    """Iterate over the entries of the whole model."""
    for row in table:
        for layer in range(arch.num_hidden_layers if row.is_in_layers else 1):
            if row.is_in(arch, layer):
                for expert in range(arch.num_experts if row.is_expert else 1):
                    yield _entry(row, layer, expert)


def expected_shapes(arch: Architecture, table: Table = TABLE) -> dict[str, Shape]:
    """Return name and shape of every tensor in a complete Hugging Face checkpoint of this architecture."""
    return {
        name: shape
        for entry in entries(arch, table)
        for name, shape in zip(entry.names, entry.shapes(arch), strict=True)
    }


def frozen_tensors(arch: Architecture) -> frozenset[str]:
    """Return the names of the tensors that training leaves as they are, which are in fp32."""
    rows = tuple(row for row in TABLE if row.is_frozen)
    return frozenset(expected_shapes(arch, rows))


def trained_shapes(arch: Architecture) -> dict[str, Shape]:
    """Return name and shape of every tensor that training changes."""
    return expected_shapes(arch, TRAINED_TABLE)


_TENSOR_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_of_next_token_layer(arch: Architecture, name: str) -> bool:
    """Whether a tensor belongs to a layer behind the last one that predicts further tokens (multi-token prediction)."""
    layer, first = _TENSOR_LAYER.match(name), arch.num_hidden_layers
    return layer is not None and first <= int(layer[1]) < first + arch.num_nextn_predict_layers
