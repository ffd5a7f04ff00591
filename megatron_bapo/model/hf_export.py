"""Exports a sharded Megatron model as a stream of tensors with Hugging Face names.

Every tensor of a pipeline stage is gathered on one rank of the stage, which writes it. No tensor crosses stages, and
every rank on every host writes its share.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_bapo.config.architecture import WEIGHTS_INDEX, Architecture
from megatron_bapo.files import flush, read_json_object, replace_folder
from megatron_bapo.model.build import Chunk, PolicyModel, finish_param_gather
from megatron_bapo.model.hf_import import SafetensorsFolder
from megatron_bapo.model.hf_mapping import Entry, Shape, Tensors, frozen_tensors, lookup
from megatron_bapo.model.lora import merged_values
from megatron_bapo.model.stacked_experts import Stacked, file_shapes
from megatron_bapo.parallel.collectives import barrier, receive, send
from megatron_bapo.parallel.groups import Axis, ParallelGroups
from megatron_bapo.weight_sync.version_file import raw_bytes, table_of_contents

COPIED_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model", "tiktoken.model",
    "*.py",  # classes that `auto_map` of config.json and tokenizer_config.json names
)  # fmt: skip


class StageTensors(Tensors, Protocol):
    """Tensors of one pipeline stage in DDP wrappers."""

    @property
    def chunks(self) -> Sequence[Chunk]: ...


class Read(Protocol):
    """Returns the tensor to stream for a parameter, in its shape, on rank `to` of the ranks that have the same part.

    The call may be a collective of these ranks. The values returned on the other ranks are ignored.
    """

    def __call__(self, parameter: torch.nn.Parameter, *, to: int) -> torch.Tensor | None: ...


def _weights(parameter: torch.nn.Parameter, *, to: int) -> torch.Tensor:
    return merged_values(parameter)


@dataclass(frozen=True)
class _Share:
    """One of this rank's parameters, and the rank that gathers it."""

    parameter: torch.nn.Parameter
    entry: Entry
    shards: Axis
    """Ranks over which the parameter is split."""
    replicas: Axis
    """Ranks that have the same part of it."""
    owner: tuple[int, int]
    """Rank of the owner on the two axes."""

    @property
    def is_own(self) -> bool:
        return (self.shards.rank, self.replicas.rank) == self.owner


def _rounds(model: StageTensors, groups: ParallelGroups) -> list[list[_Share]]:
    """Return this rank's shares of what its stage streams, in rounds that are the same on all ranks of the stage.

    The owner of a parameter is the rank with the fewest elements so far among the ranks that have a part of it. The
    loads of the ranks of one expert rank, or of all ranks without experts, therefore differ by at most the largest
    parameter of the stage, and a rank owns at most that much per round. A tied output layer is omitted, because the
    embedding on the first stage has its value.
    """
    architecture, num_ranks = model.architecture, groups.stage_size
    entries = [
        (parameter, lookup(name, architecture, model.table))
        for name, parameter in model.named_parameters()
        if name != "output_layer.weight" or not architecture.tie_word_embeddings
    ]
    entries.sort(key=lambda each: each[1].row.is_frozen)  # as `write_safetensors` requires
    sizes = [sum(map(math.prod, entry.shapes(architecture))) for _, entry in entries]
    totals, in_round, rounds = [0] * num_ranks, [0] * num_ranks, [[]]
    for (parameter, entry), size in zip(entries, sizes, strict=True):
        shards, replicas, part, num_parts = groups.tensor, groups.data_context, 0, 1
        if entry.row.is_expert:  # each expert-parallel rank chooses its own owner
            shards, replicas = groups.expert_tensor, groups.expert_data
            part, num_parts = groups.expert.rank, groups.expert.size
        owners = [
            min((rank for rank in range(num_ranks) if rank // shards.size % num_parts == each), key=totals.__getitem__)
            for each in range(num_parts)
        ]
        if size + max(in_round[owner] for owner in owners) > max(sizes):
            in_round = [0] * num_ranks
            rounds.append([])
        for owner in owners:
            totals[owner] += size
            in_round[owner] += size
        owner = owners[part] % shards.size, owners[part] // (shards.size * num_parts)
        rounds[-1].append(_Share(parameter, entry, shards, replicas, owner))
    return rounds


def own_shapes(model: StageTensors, groups: ParallelGroups) -> dict[str, Shape]:
    """Return name and shape of the tensors that `stream_tensors` yields on this rank, in that order."""
    return {
        name: shape
        for shares in _rounds(model, groups)
        for share in shares
        if share.is_own
        for name, shape in zip(share.entry.names, share.entry.shapes(model.architecture), strict=True)
    }


def _gather(local: torch.Tensor, axis: Axis) -> Iterator[torch.Tensor]:
    """Yield the tensor of every rank of the axis in turn; the other ranks send theirs to this rank."""
    for rank in range(axis.size):
        if rank == axis.rank:
            yield local
        else:
            received = torch.empty_like(local, memory_format=torch.contiguous_format)
            receive({rank: received}, axis)
            yield received
            del received  # free it before the next one is allocated


def merge(
    entry: Entry, architecture: Architecture, shards: Iterable[torch.Tensor], num_ranks: int
) -> list[torch.Tensor]:
    """Merge the shards of one parameter, given in rank order, into its Hugging Face tensors.

    A tensor that is contiguous in a single shard is returned as a view.
    """
    row, merged, remaining = entry.row, [], iter(shards)
    for rank in range(num_ranks):
        shard = next(remaining)
        if row.layout is None:
            return [shard]
        pieces = row.pieces(architecture, rank, num_ranks)
        if num_ranks == 1 and len(pieces) == len(entry.names):
            return [shard.narrow(row.dim, piece.local_start, piece.size) for piece in pieces]
        merged = merged or [shard.new_empty(shape) for shape in entry.shapes(architecture)]
        for piece in pieces:
            target = merged[piece.part].narrow(row.dim, piece.hf_start, piece.size)
            target.copy_(shard.narrow(row.dim, piece.local_start, piece.size))
        del shard  # free it before the next one is allocated
    return merged


def _gather_parameter(
    share: _Share, local: torch.Tensor | None, architecture: Architecture
) -> list[tuple[str, torch.Tensor]]:
    """Gather a parameter on its owner as (name, full tensor on the CPU); ranks with other parts send theirs."""
    row, (shard, replica) = share.entry.row, share.owner
    if share.replicas.rank != replica or (row.layout is None and not share.is_own):
        return []
    assert local is not None, f"no value for {share.entry.names[0]} on the rank that provides it"
    if not share.is_own:
        send(local.contiguous(), share.shards, to=shard)
        return []
    shards = _gather(local, share.shards) if row.layout else [local]
    tensors = merge(share.entry, architecture, shards, share.shards.size)
    return [(name, tensor.detach().cpu()) for name, tensor in zip(share.entry.names, tensors, strict=True)]


@torch.no_grad()
def stream_tensors(
    model: StageTensors, groups: ParallelGroups, *, read: Read | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full tensor on the CPU) of the parameters that this rank owns in its pipeline stage.

    Without `read` these are the model's weights, which are gathered first if an update has deferred that.

    All ranks of the stage take part: they exchange a round of parameters, then yield their own, and each rank must
    exhaust the iterator. A tensor may be a view of what `read` returned; copy it to keep it past the next one. Extra
    memory is full tensors of at most the size of the stage's largest parameter, plus one shard of a parameter.
    """
    if read is None:
        finish_param_gather([chunk.ddp for chunk in model.chunks])
        read = _weights
    for shares in _rounds(model, groups):
        own: list[tuple[str, torch.Tensor]] = []
        for share in shares:
            own += _gather_parameter(share, read(share.parameter, to=share.owner[1]), model.architecture)
        while own:
            yield own.pop(0)


def write_safetensors(
    path: Path,
    shapes: dict[str, Shape],
    tensors: Iterable[tuple[str, torch.Tensor]],
    in_fp32: Collection[str] = (),
) -> None:
    """Write a stream of tensors to a safetensors file, one at a time, and flush it to disk.

    `shapes` lists the tensors in order, because the format begins with a table of contents. They have the dtype of the
    first one, except those in `in_fp32`, which are the last ones.
    """
    remaining, dtype = iter(shapes.items()), None
    with path.open("wb") as file:
        for name, tensor in tensors:
            if dtype is None:
                dtype = tensor.dtype
                file.write(table_of_contents(shapes, str(dtype).removeprefix("torch."), in_fp32))
            next_name, next_shape = next(remaining, (None, ()))
            kind = torch.float32 if name in in_fp32 else dtype
            assert (name, tensor.shape, tensor.dtype) == (next_name, next_shape, kind), (
                f"expected {next_name} {list(next_shape)} {kind}, got {name} {list(tensor.shape)} {tensor.dtype}"
            )
            file.write(raw_bytes(tensor.contiguous()))
            del tensor  # free it before the next one is allocated
    flush(path)
    absent = [name for name, _ in remaining]
    assert not absent, f"{len(absent)} of {len(shapes)} tensors are missing from the stream, first {absent[0]}"


def write_stage(folder: Path, model: StageTensors, groups: ParallelGroups, *, read: Read | None = None) -> None:
    """Write this stage to safetensors files with names in Hugging Face's style, one file per rank that owns tensors.

    A rank that cannot write its file still sends the other ranks their tensors before it raises.
    """
    shapes, tensors = own_shapes(model, groups), stream_tensors(model, groups, read=read)
    try:
        if shapes:
            number = groups.pipeline.rank * groups.stage_size + groups.stage_rank + 1
            name = f"model-{number:05d}-of-{groups.pipeline.size * groups.stage_size:05d}.safetensors"
            write_safetensors(folder / name, shapes, tensors, frozen_tensors(model.architecture))
    finally:
        for _ in tensors:
            pass


def save_hugging_face(model: PolicyModel, groups: ParallelGroups, source: Path, target: Path) -> None:
    """Write `target` as a Hugging Face checkpoint; config and tokenizer files come from `source`.

    The folder is written as `target` + `.partial` and renamed when it is complete, so an existing folder is complete.
    """
    partial = target.with_name(target.name + ".partial")
    if groups.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier(groups)
    if model.architecture.family.stacked_experts:
        _write_stacked(partial, model, groups)
    else:
        write_stage(partial, model, groups)
    barrier(groups)
    if groups.is_main:
        complete_folder(partial, model.architecture, model.config.params_dtype, source)
        flush_to_disk(partial)
        replace_folder(target, partial)
    barrier(groups)


def _write_stacked(folder: Path, model: PolicyModel, groups: ParallelGroups) -> None:
    """Write the tensors of a family whose files have those of all experts in one: first by expert, then stacked.

    Each rank stacks its share of the tensors, whatever stage they are of.
    """
    by_expert = folder / "by-expert"
    if groups.is_main:
        by_expert.mkdir()
    barrier(groups)
    write_stage(by_expert, model, groups)
    barrier(groups)
    rank, num_ranks = groups.global_rank, groups.pipeline.size * groups.stage_size
    shapes = dict(list(file_shapes(model.architecture).items())[rank::num_ranks])
    with SafetensorsFolder(by_expert) as written:
        stacked = Stacked(written, model.architecture)
        if shapes:
            name = f"model-{rank + 1:05d}-of-{num_ranks:05d}.safetensors"
            write_safetensors(folder / name, shapes, ((name, stacked.slice(name)[:]) for name in shapes))
    barrier(groups)
    if groups.is_main:
        shutil.rmtree(by_expert)


def flush_to_disk(folder: Path) -> None:
    """Flush a folder's files before it is renamed, so a power failure cannot keep the name but lose the files.

    `write_safetensors` already flushes its files.
    """
    for path in (*folder.rglob("*"), folder):
        if path.suffix != ".safetensors":
            flush(path)


def complete_folder(
    folder: Path, architecture: Architecture, dtype: torch.dtype, source: Path, fields: dict[str, Any] | None = None
) -> None:
    """Complete a folder of weights to a Hugging Face checkpoint: add an index, and config and tokenizer of `source`.

    `fields` are those of config.json if they are not the ones of `source`. Layers that predict further tokens are not
    among the weights, and config.json says so.
    """
    _write_index(folder, architecture, dtype.itemsize)
    fields = read_json_object(source / "config.json") if fields is None else fields
    _write_config(dict(fields), folder, str(dtype).removeprefix("torch."))
    for pattern in COPIED_FILES:
        for path in source.glob(pattern):
            shutil.copy2(path, folder / path.name)


def _write_index(folder: Path, architecture: Architecture, itemsize: int) -> None:
    """Write the index of tensors and files after checking that the folder has exactly the expected tensors."""
    expected = file_shapes(architecture)
    with SafetensorsFolder(folder) as written:
        found, files = written.shapes(), written.file_names()
    wrong = sorted(name for name in found.keys() | expected if found.get(name) != expected.get(name))
    assert not wrong, (
        f"{len(wrong)} of {len(expected)} exported tensors are wrong, first {wrong[0]}: expected shape "
        f"{expected.get(wrong[0])}, found {found.get(wrong[0])}"
    )
    frozen = frozen_tensors(architecture)
    total_size = sum((4 if name in frozen else itemsize) * math.prod(shape) for name, shape in found.items())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=1))


def _write_config(fields: dict[str, Any], target: Path, dtype: str) -> None:
    """Write config.json with the dtype of the weights, under the key names of transformers 4 and 5."""
    fields |= {name: dtype for name in ("dtype", "torch_dtype") if name == "dtype" or name in fields}
    fields.pop("quantization_config", None)  # exported weights are not quantized
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if fields.get(name):
            fields[name] = 0
    (target / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
