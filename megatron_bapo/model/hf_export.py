"""Streams a sharded Megatron model as Hugging Face-named tensors.

Every pipeline stage streams its own layers from its leader rank (tensor rank 0, data rank 0), so that nothing crosses
stages and no rank ever holds more than its shard and one parameter's full tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_bapo.model.build import PolicyModel, finish_param_gather
from megatron_bapo.model.hf_import import SafetensorsFolder, check_names
from megatron_bapo.model.hf_mapping import Row, lookup
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.parallel.groups import Axis, ParallelGroups

COPIED_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json", "tokenizer.model",
)  # fmt: skip


def _gather(local: torch.Tensor, axis: Axis) -> list[torch.Tensor] | None:
    """The local tensors of all ranks of the axis, on its rank 0 only."""
    if axis.size == 1:
        return [local]
    shards = [torch.empty_like(local) for _ in range(axis.size)] if axis.rank == 0 else None
    dist.gather(local.contiguous(), shards, dst=axis.global_ranks[0], group=axis.group)
    return shards


def _merge(shards: list[torch.Tensor], row: Row, model: PolicyModel) -> list[torch.Tensor]:
    """The full Hugging Face tensors of one parameter from its tensor-parallel shards."""
    if row.layout is None:
        return [shards[0]]
    pieces = [row.layout(model.architecture, rank, len(shards)) for rank in range(len(shards))]
    merged = []
    for part in range(len(row.hugging_face)):
        mine = [(shard, piece) for shard, ps in zip(shards, pieces, strict=True) for piece in ps if piece.part == part]
        dim = mine[0][1].dim
        shape = list(shards[0].shape)
        shape[dim] = sum(piece.size for _, piece in mine)
        full = shards[0].new_empty(shape)
        for shard, piece in mine:
            full.narrow(dim, piece.hf_start, piece.size).copy_(shard.narrow(dim, piece.local_start, piece.size))
        merged.append(full)
    return merged


@torch.no_grad()
def stream_tensors(
    model: PolicyModel,
    groups: ParallelGroups,
    *,
    value_of: Callable[[torch.nn.Parameter], torch.Tensor | None] = lambda parameter: parameter,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor on the CPU) of this pipeline stage, on its leader rank; other ranks take part and yield none.

    `value_of` picks what to stream for a parameter: itself, or an optimizer state of its shape. Every rank calls it;
    what it gives on data rank 0 counts. A tied output layer is left out: the first stage's embedding is its value.
    """
    finish_param_gather([model.ddp])
    for name, parameter in model.named_parameters():
        if name == "output_layer.weight" and model.architecture.tie_word_embeddings:
            continue
        row, names = lookup(name, model.layer_offset)
        local = value_of(parameter)
        if groups.data_context.rank != 0:
            continue
        assert local is not None, f"no value for {name} on the rank that streams it"
        local = local.detach()
        shards = _gather(local, groups.tensor) if row.layout else [local]
        if groups.tensor.rank == 0 and shards is not None:
            for hf_name, tensor in zip(names, _merge(shards, row, model), strict=True):
                yield hf_name, tensor.cpu()


def write_stage_file(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], groups: ParallelGroups) -> None:
    """Collect this stage's stream into one safetensors file, named in Hugging Face's style, on the stage's leader."""
    held = {name: tensor.contiguous() for name, tensor in tensors}
    if groups.is_stage_leader:
        name = f"model-{groups.pipeline.rank + 1:05d}-of-{groups.pipeline.size:05d}.safetensors"
        save_file(held, folder / name, metadata={"format": "pt"})


def save_hugging_face(model: PolicyModel, groups: ParallelGroups, source: Path, target: Path) -> None:
    """Write `target` as a Hugging Face checkpoint; config and tokenizer files come from `source`.

    Everything is complete under `target` + `.partial` before it is renamed, so a folder that exists is whole.
    """
    partial = target.with_name(target.name + ".partial")
    if groups.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier(groups)
    write_stage_file(partial, stream_tensors(model, groups), groups)
    barrier(groups)
    if groups.is_main:
        with SafetensorsFolder(partial) as folder:
            check_names(folder.names(), model.architecture, partial)
            index = {"metadata": {}, "weight_map": dict(sorted(folder.file_names().items()))}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        for name in COPIED_FILES:
            if (source / name).is_file():
                shutil.copy2(source / name, partial / name)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    barrier(groups)
