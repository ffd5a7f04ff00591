"""Loads safetensors with Hugging Face names into a sharded Megatron model; each rank reads only its own parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from megatron_bapo.config.architecture import WEIGHTS_INDEX, Architecture, listed_files
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_mapping import Entry, Shape, Tensors, is_of_next_token_layer, lookup
from megatron_bapo.model.hf_table import EMBEDDING, OUTPUT_LAYER
from megatron_bapo.model.precision import set_values
from megatron_bapo.model.stacked_experts import by_expert, file_shapes
from megatron_bapo.parallel.groups import Axis, ParallelGroups

Write = Callable[[torch.nn.Parameter, torch.Tensor], object]
_ROWS_AT_A_TIME = 8192


class Source(Protocol):
    """Tensors with Hugging Face names."""

    def slice(self, name: str) -> Any:
        """Return a tensor, or a lazy view of it; indexing it reads only that part."""
        ...


class SafetensorsFolder:
    """Memory-mapped tensors of one folder by name; a context manager.

    If there is an index, only the files that it lists are read, as in transformers and vLLM.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, tuple[str, Any]] = {}

    def __enter__(self) -> SafetensorsFolder:
        index = self._folder / WEIGHTS_INDEX
        if index.is_file():
            paths = [self._folder / name for name in listed_files(index)]
        else:
            paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise UserError(f"{self._folder} contains no *.safetensors files; it is not a complete checkpoint")
        for path in paths:
            self._open(path)
        return self

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, "pt"))
        except (SafetensorError, FileNotFoundError) as error:
            raise UserError(
                f"{path} is not a readable safetensors file ({error}); download or write it again"
            ) from None
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in self._files:
                raise UserError(
                    f"{self._folder}: both {self._files[name][0]} and {path.name} contain {name}; keep the files of "
                    "only one checkpoint"
                )
            self._files[name] = (path.name, file)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shapes(self) -> dict[str, Shape]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, (_, file) in self._files.items()}

    def file_names(self) -> dict[str, str]:
        """Return tensor name -> file name."""
        return {name: file_name for name, (file_name, _) in self._files.items()}

    def slice(self, name: str) -> Any:
        """Return a lazy view of one tensor; indexing it reads only that part."""
        if name not in self._files:
            raise UserError(f"{self._folder} lacks the tensor {name}; download or write the folder again")
        return self._files[name][1].get_slice(name)


def check_tensors(
    found: dict[str, Shape], architecture: Architecture, folder: Path, expected: dict[str, Shape] | None = None
) -> None:
    """Check that a folder has every expected tensor in its shape and no other, and raise UserError otherwise.

    By default they are those of a Hugging Face checkpoint.
    Redundant tensors of tied embeddings and of old exports are allowed, and layers that predict further tokens.
    """
    expected = file_shapes(architecture) if expected is None else expected
    ignorable = {OUTPUT_LAYER} if architecture.tie_word_embeddings else set()
    surplus = {
        name
        for name in found.keys() - expected - ignorable
        if not name.endswith("rotary_emb.inv_freq") and not is_of_next_token_layer(architecture, name)
    }
    if missing := sorted(expected.keys() - found):
        raise UserError(
            f"{folder} lacks {len(missing)} tensors that config.json requires, first {missing[0]}; complete the "
            "download, or use the config.json of these weights"
        )
    if surplus:
        raise UserError(
            f"{folder} contains {len(surplus)} tensors that the architecture does not have, first "
            f"{min(surplus)}; use the config.json of these weights"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise UserError(
                f"{folder}: {name} has the shape {list(found[name])}, but config.json requires {list(shape)}; use the "
                "config.json of these weights"
            )


def check_tied_output_layer(folder: SafetensorsFolder, path: Path) -> None:
    """Raise UserError if a checkpoint whose config.json ties the output layer to the embedding has another one.

    transformers 5 and vLLM 0.32 then do not tie them.
    """
    shapes = folder.shapes()
    if OUTPUT_LAYER not in shapes:
        return
    embedding, output = folder.slice(EMBEDDING), folder.slice(OUTPUT_LAYER)
    starts = range(0, shapes[EMBEDDING][0], _ROWS_AT_A_TIME)
    rows = (slice(start, start + _ROWS_AT_A_TIME) for start in starts)
    has_same_shape = shapes[OUTPUT_LAYER] == shapes[EMBEDDING]
    if not (has_same_shape and all(torch.equal(embedding[each], output[each]) for each in rows)):
        raise UserError(
            f"{path}: config.json has tie_word_embeddings=true, but {OUTPUT_LAYER} differs from {EMBEDDING}, and "
            "transformers and vLLM then use both; set tie_word_embeddings=false, or remove the tensor"
        )


def split_axis(entry: Entry, groups: ParallelGroups) -> Axis:
    """Return the mesh axis over which a parameter is split."""
    return groups.tensor if entry.row.axis == "tensor" else groups.expert_tensor


def local_tensor(
    entry: Entry, architecture: Architecture, sources: list[Any], rank: int, num_ranks: int
) -> torch.Tensor:
    """Return one rank's part of a parameter; `sources` are its Hugging Face tensors or lazy views of them.

    The result is a view of the source if the part is contiguous, otherwise a new tensor.
    """
    row = entry.row
    if row.layout is None:
        return sources[0][:]
    pieces = sorted(row.pieces(architecture, rank, num_ranks), key=lambda piece: piece.local_start)
    parts = []
    for piece in pieces:
        span = slice(piece.hf_start, piece.hf_start + piece.size)
        parts.append(sources[piece.part][span] if row.dim == 0 else sources[piece.part][:, span])
    shape = entry.local_shape(architecture, num_ranks)
    if sum(piece.size for piece in pieces) < shape[row.dim]:  # padding of the vocabulary, or parts without a tensor
        whole = torch.zeros(shape, dtype=parts[0].dtype if parts else torch.float32)
        for piece, part in zip(pieces, parts, strict=True):
            whole.narrow(row.dim, piece.local_start, piece.size).copy_(part)
        return whole
    return parts[0] if len(parts) == 1 else torch.cat(parts, row.dim)


@torch.no_grad()
def load_tensors(
    model: Tensors,
    folder: Source,
    groups: ParallelGroups,
    *,
    write: Write = set_values,
) -> None:
    """Call `write(parameter, tensor)` for every parameter of this rank with its part of the folder's tensors.

    The tensor has the file's dtype and is in host memory, possibly as a read-only view of the file, so `write` must
    copy it. Rows that pad the vocabulary are zero. Extra host memory is at most one such tensor. Raises UserError if a
    tensor is missing.
    """
    architecture = model.architecture
    for name, parameter in model.named_parameters():
        entry = lookup(name, architecture, model.table)
        axis = split_axis(entry, groups)
        shape = entry.local_shape(architecture, axis.size)
        assert parameter.shape == shape, f"{name} has the shape {list(parameter.shape)}, but its row has {list(shape)}"
        tied = name == "output_layer.weight" and architecture.tie_word_embeddings
        sources = [folder.slice(hf_name) for hf_name in ((EMBEDDING,) if tied else entry.names)]
        write(parameter, local_tensor(entry, architecture, sources, axis.rank, axis.size))


def load_hugging_face(model: Tensors, model_path: Path, groups: ParallelGroups, *, write: Write = set_values) -> None:
    """Load a Hugging Face checkpoint folder; `write` is called as in `load_tensors`.

    Raises UserError if a tensor is missing, differs in shape from config.json, or does not belong to the model.
    """
    with SafetensorsFolder(model_path) as folder:
        check_tensors(folder.shapes(), model.architecture, model_path)
        if model.architecture.tie_word_embeddings:
            check_tied_output_layer(folder, model_path)
        load_tensors(model, by_expert(folder, model.architecture), groups, write=write)
