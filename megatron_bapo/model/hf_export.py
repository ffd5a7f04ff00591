"""Streams a sharded Megatron model as Hugging Face-named tensors.

Every pipeline stage streams its own layers from its leader rank (tensor rank 0, data rank 0), so that nothing crosses
stages and no rank ever holds more than its shard, one parameter's full tensors and one more shard of it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch

from megatron_bapo.config.architecture import WEIGHTS_INDEX, Architecture
from megatron_bapo.model.build import PolicyModel, finish_param_gather
from megatron_bapo.model.hf_import import SafetensorsFolder
from megatron_bapo.model.hf_mapping import Entry, Shape, expected_shapes, global_name, lookup
from megatron_bapo.model.precision import values_of
from megatron_bapo.parallel.collectives import barrier, receive, send
from megatron_bapo.parallel.groups import Axis, ParallelGroups
from megatron_bapo.weight_sync.version_file import raw_bytes, table_of_contents

COPIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model",
)  # fmt: skip

Read = Callable[[torch.nn.Parameter], torch.Tensor | None]


def _parameters(model: PolicyModel, groups: ParallelGroups) -> Iterator[tuple[torch.nn.Parameter, list[Entry]]]:
    """What this pipeline stage streams: every parameter with its entry, an expert's with those of all expert ranks.

    A tied output layer is left out: the embedding on the first stage is its value.
    """
    architecture = model.architecture
    experts_per_rank = architecture.num_experts // groups.expert.size
    for name, parameter in model.named_parameters():
        if name == "output_layer.weight" and architecture.tie_word_embeddings:
            continue
        entry = lookup(name)
        offsets = range(0, architecture.num_experts, experts_per_rank) if entry.row.is_expert else (0,)
        yield parameter, [lookup(global_name(name, 0, offset)) for offset in offsets]


def stage_shapes(model: PolicyModel, groups: ParallelGroups) -> dict[str, Shape]:
    """Name and shape of what `stream_tensors` gives on a stage's leader, in its order."""
    return {
        name: shape
        for _, entries in _parameters(model, groups)
        for entry in entries
        for name, shape in zip(entry.names, entry.shapes(model.architecture), strict=True)
    }


def _to_first(local: torch.Tensor, axis: Axis) -> Iterator[torch.Tensor]:
    """On rank 0 of the axis every rank's tensor in turn, none on the others."""
    if axis.rank > 0:
        send(local.contiguous(), axis, to=0)
        return
    yield local
    for rank in range(1, axis.size):
        received = torch.empty_like(local, memory_format=torch.contiguous_format)
        receive({rank: received}, axis)
        yield received
        del received  # before the next one is made


def merge(
    entry: Entry, architecture: Architecture, shards: Iterable[torch.Tensor], num_ranks: int
) -> list[torch.Tensor]:
    """The Hugging Face tensors of one parameter from its shards, in rank order.

    What one shard holds in one place is not copied: the result is a view.
    """
    row, merged = entry.row, []
    for rank, shard in enumerate(shards):
        if row.layout is None:
            return [shard]
        pieces = row.layout(architecture, rank, num_ranks)
        if num_ranks == 1 and len(pieces) == len(entry.names):
            return [shard.narrow(row.dim, piece.local_start, piece.size) for piece in pieces]
        merged = merged or [shard.new_empty(shape) for shape in entry.shapes(architecture)]
        for piece in pieces:
            local = shard.narrow(row.dim, piece.local_start, piece.size)
            merged[piece.part].narrow(row.dim, piece.hf_start, piece.size).copy_(local)
    return merged


@torch.no_grad()
def stream_tensors(
    model: PolicyModel, groups: ParallelGroups, *, read: Read = values_of
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor on the CPU) of this pipeline stage, on its leader rank; other ranks take part and yield none.

    `read` gives what to stream for a parameter, of its shape: itself, or an optimizer state. It may be a collective of
    the ranks that hold the same part: every rank of the stage calls it for every parameter, in the same order, and what
    it gives on the first of them counts. A tensor may be a view of what `read` gave: copy what is to outlive the next
    one. Memory above the shard on the leader is one parameter's full tensors (one expert's, whatever the expert
    parallelism) and one more shard of it.
    """
    architecture = model.architecture
    finish_param_gather([chunk.ddp for chunk in model.chunks])
    for parameter, entries in _parameters(model, groups):
        row = entries[0].row
        local = read(parameter)
        holders, replicas = (
            (groups.expert_shards, groups.expert_data) if row.is_expert else (groups.tensor, groups.data_context)
        )
        if replicas.rank > 0 or (row.layout is None and holders.rank > 0):
            continue
        assert local is not None, f"no value for {entries[0].names[0]} on the rank that gives it"
        shards = _to_first(local, holders) if row.layout else iter([local])
        if holders.rank > 0:
            for _ in shards:
                pass
            continue
        num_ranks = holders.size // len(entries)
        for entry in entries:
            tensors = merge(entry, architecture, islice(shards, num_ranks), num_ranks)
            for name, tensor in zip(entry.names, tensors, strict=True):
                yield name, tensor.detach().cpu()
            del tensors, tensor


def write_safetensors(path: Path, shapes: dict[str, Shape], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a stream of tensors of one dtype to a safetensors file as they come, none of them kept.

    `shapes` says what is to come, in order: the format begins with a table of contents.
    """
    due, dtype = iter(shapes.items()), None
    with path.open("wb") as file:
        for name, tensor in tensors:
            if dtype is None:
                dtype = tensor.dtype
                file.write(table_of_contents(shapes, str(dtype).removeprefix("torch.")))
            due_name, due_shape = next(due, (None, ()))
            assert (name, tensor.shape, tensor.dtype) == (due_name, due_shape, dtype), (
                f"{name} {list(tensor.shape)} {tensor.dtype} came where {due_name} {list(due_shape)} {dtype} was due"
            )
            file.write(raw_bytes(tensor.contiguous()))
            del tensor  # before the next one takes its memory
    absent = [name for name, _ in due]
    assert not absent, f"{len(absent)} of {len(shapes)} tensors did not come, first {absent[0]}"


def write_stage_file(folder: Path, model: PolicyModel, groups: ParallelGroups, *, read: Read = values_of) -> None:
    """Stream this stage into one safetensors file, named in Hugging Face's style, on the stage's leader."""
    tensors = stream_tensors(model, groups, read=read)
    if groups.is_stage_leader:
        name = f"model-{groups.pipeline.rank + 1:05d}-of-{groups.pipeline.size:05d}.safetensors"
        write_safetensors(folder / name, stage_shapes(model, groups), tensors)
    else:
        for _ in tensors:
            pass


def save_hugging_face(model: PolicyModel, groups: ParallelGroups, source: Path, target: Path) -> None:
    """Write `target` as a Hugging Face checkpoint; config and tokenizer files come from `source`.

    Everything is complete under `target` + `.partial` before it is renamed, so a folder that exists is whole.
    """
    partial = target.with_name(target.name + ".partial")
    if groups.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier(groups)
    write_stage_file(partial, model, groups)
    barrier(groups)
    if groups.is_main:
        complete_folder(partial, model.architecture, model.config.params_dtype, source)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    barrier(groups)


def complete_folder(folder: Path, architecture: Architecture, dtype: torch.dtype, source: Path) -> None:
    """Make a Hugging Face checkpoint of a folder with all weights: the index, and config and tokenizer of `source`."""
    _write_index(folder, architecture, dtype.itemsize)
    _write_config(source, folder, str(dtype).removeprefix("torch."))
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copy2(source / name, folder / name)


def _write_index(folder: Path, architecture: Architecture, itemsize: int) -> None:
    """The list of tensors and files, after a check that the export is complete and nothing else."""
    expected = expected_shapes(architecture)
    with SafetensorsFolder(folder) as written:
        found, files = written.shapes(), written.file_names()
    wrong = sorted(name for name in found.keys() | expected if found.get(name) != expected.get(name))
    assert not wrong, (
        f"{len(wrong)} of {len(expected)} exported tensors are wrong, first {wrong[0]}: {expected.get(wrong[0])} was "
        f"due and {found.get(wrong[0])} was written"
    )
    total_size = itemsize * sum(math.prod(shape) for shape in found.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=1))


def _write_config(source: Path, target: Path, dtype: str) -> None:
    """The model's config.json, with the dtype that was written, under the names of transformers 4 and 5."""
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    fields |= {name: dtype for name in ("dtype", "torch_dtype") if name == "dtype" or name in fields}
    (target / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
