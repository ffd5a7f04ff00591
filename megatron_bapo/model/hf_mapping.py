"""Mapping between Hugging Face tensors and Megatron parameters under tensor and expert parallelism.

One table serves both import and export, for the module names of Megatron's local layer specs and of its Transformer
Engine specs. Import applies the pieces of a row's layout from the Hugging Face tensor to the local one, export in the
opposite direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.model.hf_table import TABLE, TRAINED_TABLE, Row, Table
from megatron_bapo.model.row_layouts import lengths, vocabulary

if TYPE_CHECKING:
    import torch  # the rollout service imports this file without it

Shape = tuple[int, ...]


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


def router_tensors(arch: Architecture) -> frozenset[str]:
    """Return the names of the routers' tensors that training changes unless `model.freeze_router` is set."""
    rows = tuple(row for row in TRAINED_TABLE if row.megatron[0].startswith("mlp.router."))
    return frozenset(expected_shapes(arch, rows))


def trained_shapes(arch: Architecture) -> dict[str, Shape]:
    """Return name and shape of every tensor that training changes, those of frozen routers included."""
    return expected_shapes(arch, TRAINED_TABLE)


_TENSOR_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def is_of_next_token_layer(arch: Architecture, name: str) -> bool:
    """Whether a tensor belongs to a layer behind the last one that predicts further tokens (multi-token prediction)."""
    if arch.family.gated_delta_net:
        return name.startswith("mtp.")
    layer, first = _TENSOR_LAYER.match(name), arch.num_hidden_layers
    return layer is not None and first <= int(layer[1]) < first + arch.num_nextn_predict_layers
