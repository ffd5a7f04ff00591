"""Checkpoints: the complete trainer state as safetensors and JSON, under Hugging Face tensor names.

A checkpoint can be loaded with any parallel layout.

    checkpoints/step-00000020/
        weights/ exp_avg/ exp_avg_sq/    safetensors: one file per rank that owns tensors; weights are in fp32, and
                                         Adam's moments in optimizer.moments_dtype
        state.json                       counters, Adam's step count, position in the prompt data
        adapter_config.json              with `model.lora`, PEFT's config of the adapters
        in_flight/                       rollouts for later batches, if there are any

With `model.lora` it contains the adapters, under PEFT's names; the frozen weights are those of the run's model.

Before Adam's first step its moments are zero and are not saved.

The folder is written as `*.partial` and renamed when it is complete, and renamed back before it is deleted, so a folder
with the final name is complete.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_bapo.files import flush
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.model.hf_export import flush_to_disk, write_stage
from megatron_bapo.model.hf_import import SafetensorsFolder, load_tensors
from megatron_bapo.model.peft_folder import write_adapter_config
from megatron_bapo.parallel.collectives import barrier, broadcast_object, on_main
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.optimizer import STATES, State
from megatron_bapo.trainer.worker import Worker

WEIGHTS, STATE = "weights", "state.json"
_FOLDERS: dict[State, str] = {"main": WEIGHTS, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_NAME = re.compile(r"step-(\d{8})")


class ReadState(Protocol):
    """Returns one state of a parameter on rank `to` of the ranks that share it, as `Optimizer.read` does."""

    def __call__(self, parameter: torch.nn.Parameter, state: State, *, to: int) -> torch.Tensor | None: ...


class RolloutFiles(Protocol):
    """Writes the rollouts for later batches into a checkpoint while the trainer's ranks write their state."""

    def begin_saving(self, folder: Path) -> dict[str, Any]:
        """Begin to write files into the folder; return the JSON state of the rollouts at this instant."""
        ...

    def finish_saving(self) -> None:
        """Return when the files are complete and on disk."""
        ...


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*") if _NAME.fullmatch(path.name))


@dataclass(frozen=True)
class Draft:
    """A checkpoint that has been begun: what it will hold, and where."""

    final: Path
    states: tuple[State, ...]
    content: dict[str, Any]
    """Of state.json, on rank 0."""
    rollouts: RolloutFiles | None
    """On rank 0, if there are any."""

    @property
    def partial(self) -> Path:
        return self.final.with_name(self.final.name + ".partial")


def save_checkpoint(
    worker: Worker,
    folder: Path,
    num_updates: int,
    state: dict[str, Any],
    keep: int,
    rollouts: RolloutFiles | None = None,
) -> Path:
    """Write `folder/step-N` after N updates unless it exists, then delete all but the newest `keep` checkpoints.

    `state` is JSON; `rollouts` adds its `data` and writes further files. Both are used on rank 0 only.
    """
    draft = begin(worker, folder, num_updates, state, rollouts)
    if draft is not None:
        write_tensors(draft, worker.model, worker.groups, worker.optimizer.read)
        barrier(worker.groups)
        on_main(functools.partial(commit, draft, keep) if worker.groups.is_main else None, worker.groups)
    return folder / _name(num_updates)


def begin(
    worker: Worker, folder: Path, num_updates: int, state: dict[str, Any], rollouts: RolloutFiles | None
) -> Draft | None:
    """Create the folders of a checkpoint and begin to save the rollouts; None if it exists already. Collective."""
    # The same number of updates means the same state. Only rank 0 checks, because ranks may see a network file system
    # differently.
    final, adam_step = folder / _name(num_updates), worker.optimizer.num_steps
    if broadcast_object(final.exists(), worker.groups):
        return None
    draft = Draft(final, _stored(adam_step), {**state, "adam_step": adam_step}, rollouts)
    if worker.groups.is_main:
        for leftover in folder.glob("*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        for state_name in draft.states:
            (draft.partial / _FOLDERS[state_name]).mkdir(parents=True)
        if rollouts is not None:
            draft.content["data"] = rollouts.begin_saving(draft.partial)
        if (lora := worker.config.model.lora) is not None:
            write_adapter_config(draft.partial, lora, worker.config.model_path)
    barrier(worker.groups)
    return draft


def write_tensors(draft: Draft, model: PolicyModel, groups: ParallelGroups, read: ReadState) -> None:
    """Write the tensors that this rank owns.

    A rank that cannot write still sends the others what they need, and raises when all ranks have gathered.
    """
    failures: list[OSError] = []
    for state_name in draft.states:
        folder = draft.partial / _FOLDERS[state_name]
        try:
            write_stage(folder, model.trained, groups, read=functools.partial(read, state=state_name))
        except OSError as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def commit(draft: Draft, keep: int) -> None:
    """Give a checkpoint its final name when all ranks have written it, and delete old ones; on rank 0."""
    if draft.rollouts is not None:
        draft.rollouts.finish_saving()
    write_state(draft.partial, draft.content)
    flush_to_disk(draft.partial)
    draft.partial.rename(draft.final)
    folder = draft.final.parent
    flush(folder)  # the new name, before older checkpoints are deleted
    for old in checkpoints(folder)[:-keep]:
        # On NFS a folder stays while a process has a file of it open; the next checkpoint tries again.
        shutil.rmtree(old.rename(old.with_name(old.name + ".partial")), ignore_errors=True)


def load_checkpoint(worker: Worker, checkpoint: Path) -> dict[str, Any]:
    """Load weights and moments bit-exactly from a checkpoint of any layout and return the saved state.

    Raises UserError if a file is missing or unreadable.
    """
    state = json.loads((checkpoint / STATE).read_text())
    if state["adam_step"] == 0:
        worker.optimizer.reset_moments()
    for state_name in _stored(state["adam_step"]):
        with SafetensorsFolder(checkpoint / _FOLDERS[state_name]) as folder:
            write = functools.partial(_write, worker, state_name)
            load_tensors(worker.model.trained, folder, worker.groups, write=write)
    worker.optimizer.num_steps = state["adam_step"]
    return state


def write_state(checkpoint: Path, content: dict[str, Any]) -> None:
    (checkpoint / STATE).write_text(json.dumps(content, indent=1))


def _name(num_updates: int) -> str:
    return f"step-{num_updates:08d}"


def _stored(adam_step: int) -> tuple[State, ...]:
    return STATES if adam_step else ("main",)


def _write(worker: Worker, state: State, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    worker.optimizer.write(parameter, state, tensor)
