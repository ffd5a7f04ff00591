"""Mapping between the tensors of a PEFT folder and the adapters of a sharded Megatron model.

The rows follow from those of the linear layers in `hf_mapping.py`: each half of an adapter is split over the dim that
it shares with the layer's weight, and every rank has the other half.
"""

from __future__ import annotations

from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.model.hf_table import TABLE, TRAINED_TABLE, Row, Table

ADAPTER = "adapter"
"""Name of the adapter in a Megatron linear layer."""
PEFT_PREFIX = "base_model.model."
"""Prefix of all tensor names in PEFT's files."""
_WEIGHT = ".weight"


def module_of(tensor_name: str) -> str:
    """Return the name of the linear layer of a weight, such as `q_proj`."""
    return tensor_name.removesuffix(_WEIGHT).rpartition(".")[2]


def target_parts(row: Row, lora: LoraConfig) -> tuple[int, ...]:
    """Return which of a row's Hugging Face tensors are weights of targeted linear layers."""
    return tuple(
        part
        for part, (name, dims) in enumerate(row.hugging_face)
        if len(dims.split()) == 2 and module_of(name) in lora.target_modules
    )


def adapter_table(lora: LoraConfig) -> Table:
    """Return the rows of the adapters of every linear layer that has some.

    Tensors are named as in PEFT's files, without their prefix. A fused layer, such as Megatron's QKV, has one A for
    each of its targeted parts and one B with the rows of the fused layer.
    """
    return tuple(half for row in TABLE if (parts := target_parts(row, lora)) for half in _halves(row, parts, lora.rank))


def sent_table(lora: LoraConfig | None) -> Table:
    """Return the rows of the tensors of a policy version: those of the adapters, without any all that are trained."""
    return TRAINED_TABLE if lora is None else adapter_table(lora)


def _halves(row: Row, parts: tuple[int, ...], rank: int) -> list[Row]:
    in_rows, is_column = row.megatron[0].removesuffix("weight") + f"{ADAPTER}.", row.dim == 0
    rows, named_b = [], []
    for part in parts:
        name, dims = row.hugging_face[part]
        module, (outputs, inputs) = name.removesuffix(_WEIGHT), dims.split()
        named_b.append((f"{module}.lora_B.weight", f"{outputs} {rank}"))
        rows.append(
            Row(
                (f"{in_rows}lora_A_{module_of(name)}",),
                ((f"{module}.lora_A.weight", f"{rank} {inputs}"),),
                None if is_column else row.layout,
                dim=1,
                axis=row.axis,
                is_in=row.is_in,
            )
        )
    layout, chosen = (row.layout, parts) if is_column else (None, None)
    b_row = Row((f"{in_rows}lora_B",), tuple(named_b), layout, axis=row.axis, is_in=row.is_in, parts=chosen)
    return [*rows, b_row]
