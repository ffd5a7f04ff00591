"""Experts in the files of gpt-oss, which have one tensor for all experts of a layer; the trainer has one per expert.

The stacked tensors are transposed, with the columns of gate and up in turn. Published models have their weights in
MXFP4 (OCP Microscaling Formats 1.0): blocks of 32 elements of four bits, two in a byte, with one exponent per block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import torch

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_mapping import Shape, expected_shapes
from megatron_bapo.model.hf_table import TABLE, Table

GATE_UP, DOWN = ("gate_proj", "up_proj"), ("down_proj",)
_STACKED = {GATE_UP: "gate_up_proj", DOWN: "down_proj"}
_OF_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_OF_ALL = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up|down)_proj(_bias)?")
_EXPONENT_BIAS = 127
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the first eight codes; the other eight are their negatives."""


class Tensors(Protocol):
    """Whole tensors by Hugging Face name, such as `SafetensorsFolder`."""

    def shapes(self) -> dict[str, Shape]: ...

    def slice(self, name: str) -> Any:
        """Return a tensor, or a lazy view of it; indexing it reads only that part."""
        ...


def file_shapes(arch: Architecture, table: Table = TABLE) -> dict[str, Shape]:
    """Return name and shape of every tensor in the files of a complete Hugging Face checkpoint."""
    shapes = expected_shapes(arch, table)
    if not arch.family.stacked_experts:
        return shapes
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if (parsed := _OF_EXPERT.fullmatch(name)) is None:
            found[name] = shape
            continue
        prefix, _, module, kind = parsed.groups()
        columns = shape[0] * (1 if module == "down" else 2)
        all_name = f"{prefix}{'down' if module == 'down' else 'gate_up'}_proj{'_bias' * (kind == 'bias')}"
        found[all_name] = (arch.num_experts, *shape[1:], columns)
    return found


@dataclass(frozen=True)
class ByExpert:
    """Tensors of single experts, read from stacked ones."""

    stacked: Tensors

    def shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name, shape in self.stacked.shapes().items():
            parsed = _OF_ALL.fullmatch(name)
            if parsed is None:
                shapes[name] = shape
                continue
            prefix, modules, bias = parsed.groups()
            names = GATE_UP if modules == "gate_up" else DOWN
            of_one = (shape[-1] // len(names), *shape[1:-1])
            kind = "bias" if bias else "weight"
            shapes |= {f"{prefix}{expert}.{part}.{kind}": of_one for expert in range(shape[0]) for part in names}
        return shapes

    def slice(self, name: str) -> Any:
        parsed = _OF_EXPERT.fullmatch(name)
        if parsed is None:
            return self.stacked.slice(name)
        prefix, expert, module, kind = parsed.groups()
        bias = "_bias" if kind == "bias" else ""
        if module == "down":
            return _row(self.stacked.slice(f"{prefix}down_proj{bias}"), int(expert)).t()
        both = _row(self.stacked.slice(f"{prefix}gate_up_proj{bias}"), int(expert))
        return both[..., int(module == "up") :: 2].t()


def by_expert(files: Tensors, architecture: Architecture) -> Tensors:
    """Return the tensors of a Hugging Face checkpoint's files, those of experts one by one."""
    return ByExpert(files) if architecture.family.stacked_experts else files


def _row(view: Any, index: int) -> torch.Tensor:
    return view[index : index + 1][0]


@dataclass(frozen=True)
class Stacked:
    """The tensors of a checkpoint's files, assembled from those of single experts."""

    by_expert: Tensors
    architecture: Architecture

    def shapes(self) -> dict[str, Shape]:
        return file_shapes(self.architecture)

    def slice(self, name: str) -> Any:
        parsed = _OF_ALL.fullmatch(name)
        if parsed is None:
            return self.by_expert.slice(name)
        prefix, modules, bias = parsed.groups()
        names = GATE_UP if modules == "gate_up" else DOWN
        kind = "bias" if bias else "weight"
        experts = (
            merged_columns([self.by_expert.slice(f"{prefix}{expert}.{module}.{kind}")[:] for module in names])
            for expert in range(self.architecture.num_experts)
        )
        first = next(experts)
        whole = first.new_empty((self.architecture.num_experts, *first.shape))
        for expert, values in enumerate(chain([first], experts)):
            whole[expert] = values
        return whole


def merged_columns(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the transposed tensor of one expert, with the columns of its parts in turn."""
    return (parts[0] if len(parts) == 1 else torch.stack(parts, dim=1).flatten(0, 1)).t()


def for_engine(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors by the names of vLLM's loader of gpt-oss, which takes the experts one by one, in the files' format.

    A gate waits for the up projection of its expert, and an up projection for the gate.
    """
    waiting: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        parsed = _OF_EXPERT.fullmatch(name)
        if parsed is None:
            yield name, tensor
            continue
        prefix, expert, module, kind = parsed.groups()
        names = DOWN if module == "down" else GATE_UP
        key = f"{prefix}{expert}.{_STACKED[names]}", kind
        parts = waiting.setdefault(key, {})
        parts[f"{module}_proj"] = tensor
        if len(parts) == len(names):
            del waiting[key]
            yield f"{key[0]}{'_bias' * (kind == 'bias')}", merged_columns([parts[part] for part in names])
    assert not waiting, f"{len(waiting)} experts are incomplete, first {next(iter(waiting))}"


def dequantized(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return the values [experts, columns, rows] of weights in MXFP4.

    `blocks` are uint8 [experts, rows, groups, 16], and `scales` their exponents, uint8 [experts, rows, groups].
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    num_experts, num_rows, num_groups, num_bytes = blocks.shape
    whole = torch.empty(num_experts, num_groups * num_bytes * 2, num_rows, dtype=dtype)
    for expert in range(num_experts):  # the intermediate results are several times larger
        codes = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], dim=-1).flatten(-2)
        values = torch.ldexp(table[codes.int()], scales[expert, ..., None].int() - _EXPONENT_BIAS)
        whole[expert] = values.flatten(-2).t()
    return whole


@dataclass(frozen=True)
class Dequantized:
    """The bfloat16 tensors of a folder whose experts are in MXFP4."""

    folder: Tensors

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.folder.shapes())

    def shapes(self) -> dict[str, Shape]:
        found = self.folder.shapes()
        shapes: dict[str, Shape] = {}
        for name, shape in found.items():
            if name.endswith("_blocks"):
                *outer, groups, size = shape
                shapes[name.removesuffix("_blocks")] = (*outer[:-1], groups * size * 2, outer[-1])
                scales = name.replace("_blocks", "_scales")
                if found.get(scales) != tuple(shape[:-1]):
                    raise UserError(
                        f"{scales} has the shape {list(found.get(scales, ()))}, but {name} requires "
                        f"{list(shape[:-1])}; download the model again"
                    )
            elif not name.endswith("_scales"):
                shapes[name] = shape
        return shapes

    def slice(self, name: str) -> Any:
        if f"{name}_blocks" not in self._names:
            return self.folder.slice(name)
        return dequantized(self.folder.slice(f"{name}_blocks")[:], self.folder.slice(f"{name}_scales")[:])
