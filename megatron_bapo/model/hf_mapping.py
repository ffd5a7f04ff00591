"""Which Hugging Face tensors make up which Megatron parameter, and where their rows lie under tensor parallelism.

One table, read by import and export alike. A layout is a function from (architecture, tensor-parallel rank and size) to
pieces; a piece says which rows (or columns) of one Hugging Face tensor are which rows of this rank's local tensor.
Import reads a piece from left to right, export from right to left.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron_bapo.model.architecture import Architecture


@dataclass(frozen=True)
class Piece:
    """`size` consecutive indices along `dim`, at `hf_start` in Hugging Face tensor `part`, at `local_start` here."""

    part: int
    hf_start: int
    local_start: int
    size: int
    dim: int = 0


Layout = Callable[[Architecture, int, int], list[Piece]]


def _vocabulary(arch: Architecture, rank: int, size: int) -> list[Piece]:
    rows = arch.vocab_size // size
    return [Piece(0, rank * rows, 0, rows)]


def _attention_output(arch: Architecture, rank: int, size: int) -> list[Piece]:
    columns = arch.num_attention_heads * arch.head_dim // size
    return [Piece(0, rank * columns, 0, columns, dim=1)]


def _mlp_output(arch: Architecture, rank: int, size: int) -> list[Piece]:
    columns = arch.intermediate_size // size
    return [Piece(0, rank * columns, 0, columns, dim=1)]


def _gate_and_up(arch: Architecture, rank: int, size: int) -> list[Piece]:
    """Each rank holds its gate rows, then its up rows."""
    rows = arch.intermediate_size // size
    return [Piece(part, rank * rows, part * rows, rows) for part in (0, 1)]


def _query_key_value(arch: Architecture, rank: int, size: int) -> list[Piece]:
    """Megatron interleaves by key/value head: its query heads, then its key, then its value."""
    d = arch.head_dim
    query_rows = arch.num_attention_heads // arch.num_key_value_heads * d
    groups = arch.num_key_value_heads // size
    pieces = []
    for local in range(groups):
        head, start = rank * groups + local, local * (query_rows + 2 * d)
        pieces += [
            Piece(0, head * query_rows, start, query_rows),
            Piece(1, head * d, start + query_rows, d),
            Piece(2, head * d, start + query_rows + d, d),
        ]
    return pieces


@dataclass(frozen=True)
class Row:
    """One line of the table. A layout of None means that every tensor-parallel rank holds the whole tensor."""

    megatron: str
    hugging_face: tuple[str, ...]
    layout: Layout | None = None


_QKV = ("q_proj", "k_proj", "v_proj")
_LAYER = "model.layers.{layer}."

TABLE = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), _vocabulary),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), _vocabulary),
    Row("input_layernorm.weight", (_LAYER + "input_layernorm.weight",)),
    Row(
        "self_attention.linear_qkv.weight",
        tuple(f"{_LAYER}self_attn.{name}.weight" for name in _QKV),
        _query_key_value,
    ),
    Row("self_attention.linear_qkv.bias", tuple(f"{_LAYER}self_attn.{name}.bias" for name in _QKV), _query_key_value),
    Row("self_attention.q_layernorm.weight", (_LAYER + "self_attn.q_norm.weight",)),
    Row("self_attention.k_layernorm.weight", (_LAYER + "self_attn.k_norm.weight",)),
    Row("self_attention.linear_proj.weight", (_LAYER + "self_attn.o_proj.weight",), _attention_output),
    Row("pre_mlp_layernorm.weight", (_LAYER + "post_attention_layernorm.weight",)),
    Row(
        "mlp.linear_fc1.weight", (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight"), _gate_and_up
    ),
    Row("mlp.linear_fc2.weight", (_LAYER + "mlp.down_proj.weight",), _mlp_output),
)  # fmt: skip

_ROWS = {row.megatron: row for row in TABLE}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def lookup(parameter_name: str, layer_offset: int) -> tuple[Row, tuple[str, ...]]:
    """The table's row for a Megatron parameter of this pipeline stage, and its Hugging Face names.

    `layer_offset` is the number of layers on earlier stages: Megatron counts layers from 0 on every stage.
    """
    match = _LAYER_NAME.fullmatch(parameter_name)
    row = _ROWS.get(match[2] if match else parameter_name)
    assert row is not None, f"no row in model/hf_mapping.py for the parameter {parameter_name}"
    layer = layer_offset + int(match[1]) if match else 0
    return row, tuple(name.format(layer=layer) for name in row.hugging_face)


def expected_names(arch: Architecture) -> set[str]:
    """Every tensor that a complete Hugging Face checkpoint of this architecture holds."""
    absent = set()
    if not arch.family.qkv_bias:
        absent.add("self_attention.linear_qkv.bias")
    if not arch.family.qk_norm:
        absent |= {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    if arch.tie_word_embeddings:
        absent.add("output_layer.weight")
    return {
        name.format(layer=layer)
        for row in TABLE
        if row.megatron not in absent
        for name in row.hugging_face
        for layer in range(arch.num_hidden_layers)
    }
