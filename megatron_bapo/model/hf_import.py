"""Fills a sharded Megatron model from Hugging Face-named safetensors, reading only what each rank owns."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_bapo.errors import UserError
from megatron_bapo.model.architecture import Architecture
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.model.hf_mapping import Piece, expected_names, lookup
from megatron_bapo.parallel.groups import Axis


class SafetensorsFolder:
    """The tensors of one folder by name, memory-mapped. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, tuple[str, Any]] = {}

    def __enter__(self) -> SafetensorsFolder:
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise UserError(f"{self._folder} holds no *.safetensors files; it is not a complete checkpoint")
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, "pt"))
            except SafetensorError as error:
                raise UserError(
                    f"{path} is not a readable safetensors file ({error}); fetch or write it again"
                ) from None
            self._files.update(dict.fromkeys(file.keys(), (path.name, file)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._files)

    def file_names(self) -> dict[str, str]:
        """Tensor name -> file name."""
        return {name: file_name for name, (file_name, _) in self._files.items()}

    def slice(self, name: str) -> Any:
        """A lazy view of one tensor: index it to read just that part."""
        if name not in self._files:
            raise UserError(f"{self._folder} lacks the tensor {name}")
        return self._files[name][1].get_slice(name)


def _check_shapes(
    name: str, parameter: torch.Tensor, sources: list[Any], pieces: list[Piece] | None, num_shards: int
) -> None:
    """The sources together have exactly the elements of the parameter's shards on all ranks."""
    found = sum(math.prod(source.get_shape()) for source in sources)
    expected = parameter.numel() * (1 if pieces is None else num_shards)
    if found != expected:
        shapes = ", ".join(str(source.get_shape()) for source in sources)
        raise UserError(
            f"the checkpoint's tensors for {name} have shapes {shapes}, {found} elements in all; config.json calls for "
            f"{expected}"
        )


def _read(source: Any, piece: Piece) -> torch.Tensor:
    stop = piece.hf_start + piece.size
    return source[piece.hf_start : stop] if piece.dim == 0 else source[:, piece.hf_start : stop]


def _fill(target: torch.Tensor, sources: list[Any], pieces: list[Piece] | None) -> None:
    if pieces is None:
        target.copy_(sources[0][:])
        return
    for piece in pieces:
        target.narrow(piece.dim, piece.local_start, piece.size).copy_(_read(sources[piece.part], piece))


def hugging_face_names(model: PolicyModel, parameter_name: str) -> tuple[str, ...]:
    """The tensors that fill a parameter; a tied output layer is filled from the embedding."""
    _, names = lookup(parameter_name, model.layer_offset)
    tied = parameter_name == "output_layer.weight" and model.architecture.tie_word_embeddings
    return ("model.embed_tokens.weight",) if tied else names


@torch.no_grad()
def load_tensors(
    model: PolicyModel,
    folder: SafetensorsFolder,
    tensor_axis: Axis,
    *,
    put: Callable[[torch.nn.Parameter, torch.Tensor], None] | None = None,
) -> None:
    """Fill every parameter of this rank from the folder, or hand `put` the fp32 values of each.

    Peak memory above the model is one parameter. Raises UserError when a tensor is missing.
    """
    for name, parameter in model.named_parameters():
        row, _ = lookup(name, model.layer_offset)
        sources = [folder.slice(hf_name) for hf_name in hugging_face_names(model, name)]
        pieces = row.layout and row.layout(model.architecture, tensor_axis.rank, tensor_axis.size)
        _check_shapes(name, parameter, sources, pieces, tensor_axis.size)
        target = parameter if put is None else torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
        _fill(target, sources, pieces)
        if put is not None:
            put(parameter, target)


def load_hugging_face(model: PolicyModel, model_path: Path, tensor_axis: Axis) -> None:
    """Load a Hugging Face checkpoint folder.

    Raises UserError when a tensor is missing or when the folder holds one that the model has no place for.
    """
    with SafetensorsFolder(model_path) as folder:
        check_names(folder.names(), model.architecture, model_path)
        load_tensors(model, folder, tensor_axis)


def check_names(found: set[str], architecture: Architecture, folder: Path) -> None:
    """Every expected tensor is there and no other, but for what tied embeddings and old exports repeat."""
    expected = expected_names(architecture)
    ignorable = {"lm_head.weight"} if architecture.tie_word_embeddings else set()
    surplus = {name for name in found - expected - ignorable if not name.endswith("rotary_emb.inv_freq")}
    if missing := sorted(expected - found):
        raise UserError(f"{folder} lacks {len(missing)} tensors that config.json calls for, first {missing[0]}")
    if surplus:
        raise UserError(
            f"{folder} holds {len(surplus)} tensors that the architecture has no place for, first {sorted(surplus)[0]}"
        )
