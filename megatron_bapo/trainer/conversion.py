"""Conversion between checkpoints and Hugging Face folders, in one process and without building a model.

Checkpoints are those of the trainer, and for reading those of Megatron-Core. Both have whole tensors, whatever layout
wrote them, so tensors are copied one by one. Output is written to the target name plus `.partial` and renamed when it
is complete; a later call resumes a partial folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_bapo.config.architecture import Architecture, parsed_architecture, read_architecture
from megatron_bapo.errors import UserError
from megatron_bapo.files import make_folder, read_json_object, unwritable
from megatron_bapo.model.hf_export import complete_folder, flush_to_disk
from megatron_bapo.model.hf_import import SafetensorsFolder, check_tensors
from megatron_bapo.model.hf_mapping import Shape, expected_shapes, frozen_tensors, router_tensors, trained_shapes
from megatron_bapo.model.megatron_checkpoint import MegatronTensors
from megatron_bapo.model.peft_folder import ADAPTER_CONFIG, MergedTensors, read_adapter_config, write_peft_folder
from megatron_bapo.model.stacked_experts import Dequantized, Stacked, Tensors, by_expert, file_shapes
from megatron_bapo.model.text_model import TextModel, text_fields
from megatron_bapo.model.weight_copy import (
    Advance,
    CopyResult,
    copy_tensors,
    first_difference,
    total_bytes,
)
from megatron_bapo.trainer.checkpoint import WEIGHTS, write_state


def checkpoint_bytes(model_path: Path) -> int:
    """Return the bytes of a Hugging Face model's weights in a checkpoint. Raises UserError for another folder."""
    return total_bytes(trained_shapes(read_architecture(model_path)), torch.float32)


def exported_bytes(model_path: Path, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights in a Hugging Face folder; raises as `checkpoint_bytes`."""
    architecture = read_architecture(model_path)
    return total_bytes(expected_shapes(architecture), dtype, frozen_tensors(architecture))


def checkpoint_from_hugging_face(
    source: Path, target: Path, state: dict[str, Any], *, max_file_bytes: int, advance: Advance
) -> CopyResult:
    """Convert the Hugging Face folder `source` to the trainer checkpoint `target` (fp32, before the first update).

    `state` is the content of the checkpoint's state.json. Raises UserError if the source is not a complete checkpoint
    of a supported model, if the target exists with other content, or if the disk is too small.
    """
    architecture = read_architecture(source)

    def complete(partial: Path) -> None:
        write_state(partial, {**state, "adam_step": 0})

    with SafetensorsFolder(source) as tensors:
        check_tensors(tensors.shapes(), architecture, source)
        shapes = trained_shapes(architecture)
        single = by_expert(tensors, architecture)
        return _convert(single, shapes, target, WEIGHTS, torch.float32, complete, max_file_bytes, advance)


def hugging_face_from_checkpoint(
    checkpoint: Path, origin: Path, target: Path, dtype: torch.dtype, *, max_file_bytes: int, advance: Advance
) -> CopyResult:
    """Convert a trainer checkpoint to the Hugging Face folder `target`; config and tokenizer files come from `origin`.

    Adapters are merged into the weights of `origin`, which also has the tensors that training leaves as they are.
    Raises UserError under the same conditions as `checkpoint_from_hugging_face`.
    """
    architecture = read_architecture(origin)
    weights = checkpoint / WEIGHTS
    with SafetensorsFolder(weights) as saved, ExitStack() as stack:
        frozen = frozen_tensors(architecture) | (router_tensors(architecture) - saved.shapes().keys())
        tensors: Tensors = saved
        if (checkpoint / ADAPTER_CONFIG).is_file():
            lora = read_adapter_config(checkpoint)
            weights, tensors = origin, MergedTensors(stack.enter_context(SafetensorsFolder(origin)), saved, lora)
        elif frozen:
            tensors = _WithFrozen(saved, stack.enter_context(_frozen_weights(origin, frozen)), frozen)
        check_tensors(tensors.shapes(), architecture, weights, expected_shapes(architecture))
        if architecture.family.stacked_experts:
            tensors = Stacked(tensors, architecture)
        return _to_hugging_face(tensors, architecture, origin, target, dtype, max_file_bytes, advance)


def dequantized_hugging_face(source: Path, target: Path, *, max_file_bytes: int, advance: Advance) -> CopyResult:
    """Convert a Hugging Face folder of gpt-oss with experts in MXFP4 to the bfloat16 folder `target`.

    Raises UserError under the same conditions as `checkpoint_from_hugging_face`.
    """
    architecture = dequantized_architecture(source)
    with SafetensorsFolder(source) as folder:
        tensors = Dequantized(folder)
        check_tensors(tensors.shapes(), architecture, source)
        return _to_hugging_face(tensors, architecture, source, target, torch.bfloat16, max_file_bytes, advance)


def dequantized_bytes(source: Path) -> int:
    """Return the bytes of what `dequantized_hugging_face` writes; raises as `dequantized_architecture`."""
    return total_bytes(file_shapes(dequantized_architecture(source)), torch.bfloat16)


def dequantized_architecture(source: Path) -> Architecture:
    """Return the architecture of a folder of gpt-oss with experts in MXFP4. Raises UserError for another folder."""
    fields = read_json_object(source / "config.json") if (source / "config.json").is_file() else {}
    quantization = fields.pop("quantization_config", None)
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4":
        raise UserError(f"{source} has no config.json whose quantization_config.quant_method is mxfp4; give its folder")
    return parsed_architecture(fields, source / "config.json")


def text_hugging_face(
    source: Path, target: Path, dtype: torch.dtype, *, max_file_bytes: int, advance: Advance
) -> CopyResult:
    """Write the language model in the multimodal folder `source` as the Hugging Face folder `target`.

    Raises UserError under the same conditions as `checkpoint_from_hugging_face`.
    """
    fields = text_fields(source)
    architecture = parsed_architecture(fields, source / "config.json")
    with SafetensorsFolder(source) as folder:
        tensors = TextModel(folder)
        check_tensors(tensors.shapes(), architecture, source)
        return _to_hugging_face(tensors, architecture, source, target, dtype, max_file_bytes, advance, fields)


def text_bytes(source: Path, dtype: torch.dtype) -> int:
    """Return the bytes of what `text_hugging_face` writes; raises as `text_fields`."""
    return total_bytes(expected_shapes(parsed_architecture(text_fields(source), source / "config.json")), dtype)


def hugging_face_from_megatron(
    checkpoint: Path, origin: Path, target: Path, dtype: torch.dtype, *, max_file_bytes: int, advance: Advance
) -> CopyResult:
    """Convert a checkpoint of Megatron-Core to the Hugging Face folder `target`.

    `origin` is a Hugging Face folder of the same architecture, from which config and tokenizer files come; it needs no
    weights. Raises UserError under the same conditions as `checkpoint_from_hugging_face`.
    """
    architecture = read_architecture(origin)
    if architecture.family.stacked_experts:
        raise UserError(
            f"{checkpoint} has experts with biases and attention sinks, which are not read from checkpoints of "
            "Megatron-Core; convert it with Megatron-Bridge"
        )
    if architecture.linear_layers:
        raise UserError(
            f"{checkpoint} has Gated DeltaNets, whose projections Megatron-Core stores in parts, and which are not "
            "read from its checkpoints; convert it with Megatron-Bridge"
        )
    tensors = MegatronTensors(checkpoint, architecture)
    return _to_hugging_face(tensors, architecture, origin, target, dtype, max_file_bytes, advance)


def _to_hugging_face(
    tensors: Tensors,
    architecture: Architecture,
    origin: Path,
    target: Path,
    dtype: torch.dtype,
    max_file_bytes: int,
    advance: Advance,
    fields: dict[str, Any] | None = None,
) -> CopyResult:
    """Write the tensors of a whole model, and config and tokenizer files of `origin`, as a Hugging Face folder.

    `fields` are those of config.json if they are not the ones of `origin`.
    """

    def complete(partial: Path) -> None:
        complete_folder(partial, architecture, dtype, origin, fields)

    shapes, frozen = file_shapes(architecture), frozen_tensors(architecture)
    return _convert(tensors, shapes, target, ".", dtype, complete, max_file_bytes, advance, frozen)


@contextmanager
def _frozen_weights(origin: Path, frozen: frozenset[str]) -> Iterator[SafetensorsFolder]:
    """Open the weights of a model that has tensors which training leaves as they are."""
    name = min(frozen)
    if not any(origin.glob("*.safetensors")):
        raise UserError(
            f"{origin} has no *.safetensors files, but checkpoints lack what training leaves as it is, such as {name}; "
            "give the whole folder, with its weights"
        )
    with SafetensorsFolder(origin) as weights:
        if missing := sorted(frozen - weights.shapes().keys()):
            raise UserError(f"{origin} lacks {missing[0]}, which checkpoints do not have; give the whole folder")
        yield weights


@dataclass(frozen=True)
class _WithFrozen:
    """The tensors of a checkpoint, and those of its model that training leaves as they are."""

    saved: SafetensorsFolder
    origin: SafetensorsFolder
    frozen: frozenset[str]

    def shapes(self) -> dict[str, Shape]:
        return self.saved.shapes() | {
            name: shape for name, shape in self.origin.shapes().items() if name in self.frozen
        }

    def slice(self, name: str) -> Any:
        return (self.origin if name in self.frozen else self.saved).slice(name)


def peft_from_checkpoint(checkpoint: Path, origin: Path, target: Path, dtype: torch.dtype) -> int:
    """Write the adapters of a trainer checkpoint as the PEFT folder `target`; return their number of tensors.

    `origin` is the Hugging Face folder of the model that they adapt. Raises UserError if the checkpoint has no
    adapters, or if the target exists.
    """
    if not (checkpoint / ADAPTER_CONFIG).is_file():
        raise UserError(f"{checkpoint} has no adapters: model.lora was not set; convert it without --adapter")
    if target.exists():
        raise UserError(f"{target} already exists; choose another --output or delete it")
    with _written(target) as partial, SafetensorsFolder(checkpoint / WEIGHTS) as tensors:
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial, f"--output {target}")
        write_peft_folder(partial, tensors, read_adapter_config(checkpoint), origin, dtype)
        return len(tensors.shapes())


def _convert(
    tensors: Tensors,
    shapes: dict[str, Shape],
    target: Path,
    weights: str,
    dtype: torch.dtype,
    complete: Callable[[Path], None],
    max_file_bytes: int,
    advance: Advance,
    in_fp32: frozenset[str] = frozenset(),
) -> CopyResult:
    if target.exists():
        return _check_existing(target, weights, tensors, shapes, dtype, advance, in_fp32)
    with _written(target) as partial:
        make_folder(partial / weights, f"--output {target}")
        _check_room(partial, total_bytes(shapes, dtype, in_fp32))
        copied = copy_tensors(
            tensors, shapes, partial / weights, dtype, max_file_bytes=max_file_bytes, advance=advance, in_fp32=in_fp32
        )
        complete(partial)
    return copied


@contextmanager
def _written(target: Path) -> Iterator[Path]:
    """Yield the folder to write, which is renamed to `target` when it is complete.

    Raises UserError if the system refuses to write it.
    """
    partial = target.with_name(target.name + ".partial")
    try:
        yield partial
        flush_to_disk(partial)
        partial.rename(target)
    except OSError as error:
        names = [Path(name) for name in (error.filename, error.filename2) if name is not None]
        if names and not any(name.is_relative_to(partial) for name in names):
            raise  # a file of the source cannot be read
        raise unwritable(f"--output {target}", error) from None


def _check_existing(
    target: Path,
    weights: str,
    source: Tensors,
    shapes: dict[str, Shape],
    dtype: torch.dtype,
    advance: Advance,
    in_fp32: frozenset[str],
) -> CopyResult:
    """Compare an existing target with what would be written. Raises UserError if they differ."""
    other = f"{target} already exists with other content"
    if not any((target / weights).glob("*.safetensors")):
        raise UserError(f"{other}: it has no weights; choose another --output or delete it")
    with SafetensorsFolder(target / weights) as written:
        different = first_difference(written, source, shapes, dtype, lambda size: advance(2 * size), in_fp32)
        num_files = len(set(written.file_names().values()))
    if different is not None:
        raise UserError(f"{other}: {different} differs; choose another --output or delete it")
    return CopyResult(len(shapes), total_bytes(shapes, dtype, in_fp32), num_files, num_files)


def _check_room(partial: Path, num_bytes: int) -> None:
    written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    free = shutil.disk_usage(partial).free
    if num_bytes - written > free:
        raise UserError(
            f"{partial} needs {(num_bytes - written) / 2**30:.2f} GiB and the disk has {free / 2**30:.2f} GiB free; "
            "free disk space or write to another disk"
        )
