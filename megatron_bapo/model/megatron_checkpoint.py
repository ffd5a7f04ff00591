"""Reads the weights of a Megatron-Core checkpoint (`torch_dist`) as Hugging Face tensors, whatever layout wrote it.

These are the checkpoints of Megatron-LM, Megatron-Bridge, NeMo and slime. Megatron-Core's `dist_checkpointing` stores
whole tensors, which the ranks that save them divide among themselves. Layers are stacked in one tensor or numbered
(`TransformerBlock.sharded_state_dict`), and so are experts (`SequentialMLP.sharded_state_dict`); the two halves of a
SwiGLU layer are in one tensor or in two (`apply_swiglu_sharded_factory`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.errors import UserError
from megatron_bapo.garbage_collection import collector_paused
from megatron_bapo.model.distributed_checkpoint import METADATA, DistributedCheckpoint
from megatron_bapo.model.hf_export import merge
from megatron_bapo.model.hf_mapping import Entry, Shape, entries, expected_shapes
from megatron_bapo.model.row_layouts import vocabulary

_TRACKER = "latest_checkpointed_iteration.txt"
"""Name of Megatron-LM's file with the number of the newest checkpoint."""
_PARTS = ("embedding.", "decoder.", "output_layer.")
"""Beginnings of the names of a model's weights."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WORDS = "embedding.word_embeddings.weight"


def find_megatron_checkpoint(path: Path) -> Path | None:
    """Return the folder of a Megatron-Core checkpoint, or None if there is none.

    `path` is that folder, a folder of several, of which the newest is returned, or a checkpoint of NeMo. Raises
    UserError for an incomplete checkpoint, and for one in an older format of Megatron.
    """
    newest = _newest(path)
    for folder in (newest, newest / "weights"):
        if (folder / METADATA).is_file():
            return folder
        if any(folder.glob("*.distcp")):
            raise UserError(f"{folder} has no {METADATA}, which is written last; give a checkpoint that is complete")
    if any(newest.glob("mp_rank_*")) or any(newest.glob("*/.zarray")):
        raise UserError(
            f"{newest} is a checkpoint in an older format of Megatron-LM, which only the layout that wrote it reads; "
            "let Megatron-LM convert it, with --ckpt-convert-format torch_dist and --ckpt-convert-save"
        )
    if newest != path:
        raise UserError(f"{path / _TRACKER} names {newest}, which has no checkpoint; give the folder of another one")
    if numbered := sorted(path.glob("iter_*")):
        raise UserError(
            f"{path} has no {_TRACKER}, which names the newest checkpoint; give one, such as {numbered[-1]}"
        )
    return None


def _newest(path: Path) -> Path:
    """Return the folder that Megatron-LM's tracker file names, or `path` if it has none."""
    if not (path / _TRACKER).is_file():
        return path
    newest = (path / _TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    if newest == "release":
        return path / newest
    if not re.fullmatch("[0-9]{1,18}", newest):
        raise UserError(
            f"{path / _TRACKER} has {newest[:40]!r} instead of a number or release; give a folder in {path}"
        )
    return path / f"iter_{int(newest):07d}"


@dataclass(frozen=True)
class _Place:
    """Where a checkpoint has a parameter: in each of these tensors, at an index of their first dims."""

    names: tuple[str, ...]
    index: Shape
    stacked: Shape
    """Lengths of the first dims."""


class MegatronTensors:
    """Whole tensors by Hugging Face name of a Megatron-Core checkpoint.

    Raises UserError if the folder is not a complete checkpoint, or not one of this architecture. The optimizer's state
    and layers that predict further tokens are not read. A part with several experts, as Megatron-Core's former
    GroupedMLP saves them, stays in memory while they are read.
    """

    def __init__(self, folder: Path, architecture: Architecture) -> None:
        self._folder = folder
        self._architecture = architecture
        self._entries: dict[str, tuple[Entry, int, _Place]] = {}
        self._last: tuple[_Place, list[torch.Tensor]] | None = None
        with collector_paused():
            checkpoint = DistributedCheckpoint(folder)
            prefix = _find_prefix(checkpoint)
            num_stacked: dict[str, int] = {}
            for entry in entries(architecture):
                place = _find(entry, architecture, prefix, checkpoint)
                self._entries |= {name: (entry, part, place) for part, name in enumerate(entry.names)}
                num_stacked |= dict.fromkeys(place.names, len(place.index))
            _check_surplus(checkpoint, prefix, num_stacked.keys())
            self._tensors = {name: checkpoint.tensor(name, number) for name, number in num_stacked.items()}

    def shapes(self) -> dict[str, Shape]:
        return expected_shapes(self._architecture)

    def slice(self, name: str) -> torch.Tensor:
        """Return one tensor in the dtype of the checkpoint."""
        entry, part, place = self._entries[name]
        if self._last is None or self._last[0] != place:
            halves = [self._tensors[each].read(place.index) for each in place.names]
            whole = halves[0] if len(halves) == 1 else torch.cat(halves)
            if whole.dtype not in _DTYPES:
                raise UserError(
                    f"{self._folder}: {place.names[0]} is {whole.dtype}, whose scales are not read; save it as bfloat16"
                )
            self._last = place, merge(entry, self._architecture, [whole], 1)
        return self._last[1][part]


def _find_prefix(checkpoint: DistributedCheckpoint) -> str:
    """Return what precedes the names of the weights, such as `module.` in checkpoints of NeMo."""
    names = checkpoint.shapes()
    for prefix in ("", "module.", "model."):
        if prefix + _WORDS in names:
            return prefix
    raise UserError(
        f"{checkpoint.folder} has no {_WORDS} among its {len(names)} tensors"
        f"{f', first {min(names)}' if names else ''}; give a GPT model in the format torch_dist"
    )


def _find(entry: Entry, architecture: Architecture, prefix: str, checkpoint: DistributedCheckpoint) -> _Place:
    """Return where the checkpoint has a parameter, after checking the shapes."""
    found, shape = checkpoint.shapes(), entry.local_shape(architecture, 1)
    places = list(_places(entry, architecture, prefix))
    for place in places:
        if place.names[0] not in found:
            continue
        expected = (*place.stacked, shape[0] // len(place.names), *shape[1:])
        for name in place.names:
            if not _fits(found.get(name, ()), expected, is_vocabulary=entry.row.layout is vocabulary):
                raise UserError(
                    f"{checkpoint.folder}: {name} has the shape {list(found.get(name, ()))}, but config.json requires "
                    f"{list(expected)}; use the config.json of these weights"
                )
        return place
    raise UserError(
        f"{checkpoint.folder} lacks {places[0].names[0]}, which is {entry.names[0]} in Hugging Face's names and which "
        "config.json requires; use the config.json of these weights"
    )


def _check_surplus(checkpoint: DistributedCheckpoint, prefix: str, used: Collection[str]) -> None:
    weights = {name for name in checkpoint.shapes() if name.removeprefix(prefix).startswith(_PARTS)}
    if surplus := sorted(weights.difference(used)):
        raise UserError(
            f"{checkpoint.folder} has {len(surplus)} tensors that the architecture of config.json does not have, first "
            f"{surplus[0]}; use the config.json of these weights"
        )


def _fits(shape: Shape, expected: Shape, *, is_vocabulary: bool) -> bool:
    """Whether a tensor has the expected shape; a vocabulary may have more rows, with which the writer padded it."""
    if is_vocabulary and len(shape) == len(expected):
        return shape[0] >= expected[0] and shape[1:] == expected[1:]
    return shape == expected


def _places(entry: Entry, architecture: Architecture, prefix: str) -> Iterator[_Place]:
    """Iterate over the places in which Megatron-Core may store a parameter."""
    row = entry.row
    layers: list[tuple[str, Shape, Shape]] = [("", (), ())]
    if row.is_in_layers:
        layers = [
            ("decoder.layers.", (entry.layer,), (architecture.num_hidden_layers,)),
            (f"decoder.layers.{entry.layer}.", (), ()),
        ]
    names: list[tuple[str, Shape, Shape]] = [(name, (), ()) for name in reversed(row.megatron)]
    if row.is_expert:
        local = row.megatron[0].replace(".local_experts.", ".experts.")
        names = [
            (local.replace("{expert}.", ""), (entry.expert,), (architecture.num_experts,)),
            (local.format(expert=entry.expert), (), ()),
        ]
    for (start, layer, num_layers), (name, expert, num_experts) in itertools.product(layers, names):
        whole = f"{prefix}{start}{name}"
        for parts in ((whole,), (f"{whole}_w", f"{whole}_v")):
            yield _Place(parts, layer + expert, num_layers + num_experts)
