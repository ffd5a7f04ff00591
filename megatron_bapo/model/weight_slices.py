"""Reads the slices of a weight transfer plan from this rank's parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_bapo.model.hf_import import split_axis
from megatron_bapo.model.hf_mapping import Tensors, lookup
from megatron_bapo.model.lora import merged_values
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.weight_sync.plan import Box, Slice


@dataclass(frozen=True)
class _LocalBox:
    """A box of a Hugging Face tensor and its position in a local parameter."""

    box: Box
    parameter: torch.nn.Parameter
    dim: int
    local_start: int

    def view(self, box: Box) -> torch.Tensor:
        spans = []
        for dim, (start, size) in enumerate(zip(box.start, box.shape, strict=True)):
            first = start - self.box.start[dim] + (self.local_start if dim == self.dim else 0)
            spans.append(slice(first, first + size))
        return merged_values(self.parameter, *spans)


class LocalSlices:
    """This rank's parameters by Hugging Face name. Calling the object with a slice returns a view of the parameter.

    For a parameter in FP8, or with an adapter, which is merged, the call returns a new tensor with its values.
    """

    def __init__(self, tensors: Tensors, groups: ParallelGroups) -> None:
        """`tensors` are a model's, or those of its adapters."""
        self._boxes: dict[str, list[_LocalBox]] = {}
        architecture = tensors.architecture
        for name, parameter in tensors.named_parameters():
            if name == "output_layer.weight" and architecture.tie_word_embeddings:
                continue  # the embedding on the first stage is its value
            entry = lookup(name, architecture, tensors.table)
            row, axis, shapes = entry.row, split_axis(entry, groups), entry.shapes(architecture)
            if row.layout is None:
                self._boxes[entry.names[0]] = [_LocalBox(Box.whole(shapes[0]), parameter, 0, 0)]
                continue
            for piece in row.pieces(architecture, axis.rank, axis.size):
                shape, start = list(shapes[piece.part]), [0] * len(shapes[piece.part])
                start[row.dim], shape[row.dim] = piece.hf_start, piece.size
                local = _LocalBox(Box(tuple(start), tuple(shape)), parameter, row.dim, piece.local_start)
                self._boxes.setdefault(entry.names[piece.part], []).append(local)

    def __call__(self, part: Slice) -> torch.Tensor:
        for local in self._boxes.get(part.name, ()):
            if local.box.covers(part.box):
                return local.view(part.box)
        raise AssertionError(f"this rank does not have {part}")
