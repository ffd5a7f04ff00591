"""Low-rank adapters (LoRA) of Megatron's linear layers under tensor, sequence and expert parallelism.

An adapter adds scale * B A dropout(x) to the output of a linear layer. Of a column-parallel layer, B is split like the
weight's rows and A is replicated; of a row-parallel one, A is split like the weight's columns and B is replicated. The
products with A have only `rank` columns, so they are what tensor-parallel ranks exchange. Of a layer that every rank
has whole, so are both halves. Gradients of replicated halves are complete on every rank, except under sequence
parallelism, where Megatron sums them like those of norms, and in tensor-parallel experts, where the backward pass sums
them.

Legend: I and O inputs and outputs of the linear layer on this rank; R the rank; P parts of a fused layer that have
adapters (Q, K and V, or gate and up).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.model.hf_mapping import Entry, global_name, lookup
from megatron_bapo.model.hf_table import Table
from megatron_bapo.model.lora_mapping import ADAPTER, module_of, target_parts
from megatron_bapo.model.precision import values_of
from megatron_bapo.parallel.groups import Axis, ParallelGroups
from megatron_bapo.parallel.megatron import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class LinearAdapter(torch.nn.Module):
    """The adapter of one linear layer."""

    def __init__(
        self, weight: torch.nn.Parameter, entry: Entry, arch: Architecture, lora: LoraConfig, axis: Axis, *, sp: bool
    ) -> None:
        """Create the adapter of the layer with this weight, which `axis` splits as `entry` says; values are random."""
        super().__init__()
        self.is_on = True
        self._scale, self._dropout = lora.scale, lora.dropout
        self._axis, self._is_expert, self._is_column = axis, entry.row.is_expert, entry.row.dim == 0
        self._is_whole = entry.row.layout is None
        self._sp = sp and axis.size > 1 and not self._is_expert
        parts = target_parts(entry.row, lora)
        self._names = [f"lora_A_{module_of(entry.names[part])}" for part in parts]
        num_outputs, num_inputs = weight.shape
        for name in self._names:
            self.register_parameter(name, self._half(weight, (lora.rank, num_inputs), split=not self._is_column))
        self.lora_B = self._half(weight, (num_outputs, lora.rank), split=self._is_column and not self._is_whole)
        mask_OP = torch.zeros(num_outputs, len(parts), dtype=weight.dtype, device=weight.device)
        by_parts = self._is_column and not self._is_whole
        for piece in entry.row.pieces(arch, axis.rank, axis.size) if by_parts else ():
            if piece.part in parts:
                mask_OP[piece.local_start : piece.local_start + piece.size, parts.index(piece.part)] = 1
        self._mask_OP = mask_OP if by_parts else mask_OP.fill_(1)

    def _half(self, weight: torch.nn.Parameter, shape: tuple[int, int], *, split: bool) -> torch.nn.Parameter:
        half: Any = torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
        half.allreduce = getattr(weight, "allreduce", True)
        # Which ranks count a parameter in the gradient norm: all with a part of their own, or one of those with a copy.
        half.tensor_model_parallel = split or (self._is_expert and self._axis.rank == 0)
        half.sequence_parallel = self._sp and not split
        return half

    def forward(self, input_TI: Tensor) -> Tensor:
        """Return what the adapter adds to the output of the linear layer."""
        input_TI = self._dropped(input_TI)
        a_RI, b_OR = self._a(), self._b()
        if self._is_expert:
            return F.linear(F.linear(input_TI, self._replicated(a_RI, self._is_column)), b_OR)
        group, low_TR = self._axis.group, F.linear(input_TI, a_RI)
        if self._is_whole:
            return F.linear(low_TR, b_OR)
        if self._is_column and self._sp:
            low_TR = gather_from_sequence_parallel_region(low_TR, group=group)
        elif self._is_column:
            low_TR = copy_to_tensor_model_parallel_region(low_TR, group=group)
        elif self._sp:
            low_TR = reduce_scatter_to_sequence_parallel_region(low_TR, group=group)
        else:
            low_TR = reduce_from_tensor_model_parallel_region(low_TR, group=group)
        return F.linear(low_TR, b_OR)

    @torch.no_grad()
    def delta(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return scale * B A for a range of the weight, fp32."""
        return self._b()[rows].float() @ self._a()[:, columns].float()

    def _a(self) -> Tensor:
        """Return the A of all parts, [P R, I]."""
        return torch.cat([getattr(self, name) for name in self._names])

    def _b(self) -> Tensor:
        """Return scale * B, [O, P R]: a row has its values in the columns of its part and zeros in the others."""
        scaled_OR = self._replicated(self.lora_B * self._scale, self._is_expert and not self._is_column)
        return (self._mask_OP[:, :, None] * scaled_OR[:, None]).flatten(1)

    def _replicated(self, half: Tensor, is_shared: bool) -> Tensor:
        """Return a half of an expert's adapter; the gradient of one that ranks share is summed over them."""
        return copy_to_tensor_model_parallel_region(half, group=self._axis.group) if is_shared else half

    def _dropped(self, input_TI: Tensor) -> Tensor:
        if not (self._dropout and self.training):
            return input_TI
        if self._axis.size == 1 or (self._is_column and not self._sp):  # copies of the input drop the same elements
            return F.dropout(input_TI, self._dropout)
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork():
            return F.dropout(input_TI, self._dropout)


@dataclass(frozen=True)
class Adapters:
    """The adapters of one pipeline stage, with the interface that import and export use."""

    architecture: Architecture
    table: Table
    chunks: Sequence[Any]
    """Model chunks (`Chunk`) of the stage."""
    expert_offset: int

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Iterate over the adapters' parameters, with layer and expert numbers of the whole model."""
        for chunk in self.chunks:
            for name, parameter in chunk.gpt.named_parameters():
                if is_adapter(name):
                    yield global_name(name, chunk.layer_offset, self.expert_offset), parameter

    def start(self, *, is_on: bool, trains: bool) -> None:
        """Begin a pass over several micro-batches, with or without the adapters; dropout works only if it `trains`."""
        for chunk in self.chunks:
            for module in chunk.gpt.modules():
                if isinstance(module, LinearAdapter):
                    module.is_on = is_on
                    module.train(trains)


def is_adapter(name: str) -> bool:
    """Whether a Megatron parameter belongs to an adapter."""
    return f".{ADAPTER}." in name


def attach_adapters(
    gpt: torch.nn.Module,
    arch: Architecture,
    lora: LoraConfig,
    groups: ParallelGroups,
    *,
    layer_offset: int,
    expert_offset: int,
    sp: bool,
) -> None:
    """Freeze a model chunk on its device and add trainable adapters, which change nothing until they are initialized.

    `sp`: the layout has sequence parallelism.
    """
    gpt.requires_grad_(False)
    for name, linear in list(gpt.named_modules()):
        weight = getattr(linear, "weight", None)
        if not isinstance(weight, torch.nn.Parameter):
            continue
        entry = lookup(global_name(f"{name}.weight", layer_offset, expert_offset), arch)
        if target_parts(entry.row, lora):
            axis = groups.tensor if entry.row.axis == "tensor" else groups.expert_tensor
            adapter = LinearAdapter(weight, entry, arch, lora, axis, sp=sp)
            linear.add_module(ADAPTER, adapter)
            linear.register_forward_hook(_add_adapter)
            weight.adapter = adapter  # pyright: ignore[reportAttributeAccessIssue]
    embedding: Any = getattr(gpt, "embedding", None)
    if embedding is not None:
        # Megatron recomputes a layer in the backward pass only if the layer's input needs a gradient.
        embedding.register_forward_hook(lambda _module, _inputs, hidden: hidden.requires_grad_(torch.is_grad_enabled()))


def _add_adapter(linear: torch.nn.Module, inputs: tuple[Tensor], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    adapter: Any = linear.adapter
    return (outputs[0] + adapter(inputs[0]), outputs[1]) if adapter.is_on else outputs


def merged_values(parameter: torch.Tensor, *spans: slice) -> Tensor:
    """Return the values of a parameter, or of a part of it, with its adapter merged: W + scale * B A.

    Without an adapter the result may be a view of the parameter.
    """
    values, adapter = values_of(parameter)[spans], getattr(parameter, ADAPTER, None)
    return values if adapter is None else (values.float() + adapter.delta(*spans)).to(values.dtype)
