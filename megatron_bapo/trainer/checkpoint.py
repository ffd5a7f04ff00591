"""Checkpoints: the complete trainer state as safetensors and JSON, under Hugging Face tensor names.

A checkpoint can be loaded with any parallel layout.

    checkpoints/step-00000020/
        weights/ exp_avg/ exp_avg_sq/    safetensors, fp32: one file per rank that owns tensors
        state.json                       counters, Adam's step count, position in the prompt data
        adapter_config.json              with `model.lora`, PEFT's config of the adapters
        in_flight/                       rollouts for later batches, if there are any

With `model.lora` it contains the adapters, under PEFT's names; the frozen weights are those of the run's model.

Before Adam's first step its moments are zero and are not saved.

The folder is written as `*.partial` and renamed when it is complete, so a folder with the final name is complete.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_bapo.files import flush
from megatron_bapo.model.hf_export import flush_to_disk, write_stage
from megatron_bapo.model.hf_import import SafetensorsFolder, load_tensors
from megatron_bapo.model.peft_folder import write_adapter_config
from megatron_bapo.parallel.collectives import barrier, broadcast_object
from megatron_bapo.trainer.optimizer import STATES, State
from megatron_bapo.trainer.worker import Worker

WEIGHTS, STATE = "weights", "state.json"
_FOLDERS: dict[State, str] = {"main": WEIGHTS, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_NAME = re.compile(r"step-(\d{8})")


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
    final = folder / f"step-{num_updates:08d}"
    # The same number of updates means the same state. Only rank 0 checks, because ranks may see a network file system
    # differently.
    if broadcast_object(final.exists(), worker.groups):
        return final
    partial, states = final.with_name(final.name + ".partial"), _stored(worker.optimizer.num_steps)
    if worker.groups.is_main:
        for leftover in folder.glob("*.partial"):
            shutil.rmtree(leftover)
        for state_name in states:
            (partial / _FOLDERS[state_name]).mkdir(parents=True)
        if rollouts is not None:
            state = {**state, "data": rollouts.begin_saving(partial)}
    barrier(worker.groups)
    for state_name in states:
        read = functools.partial(worker.optimizer.read, state=state_name)
        write_stage(partial / _FOLDERS[state_name], worker.model.trained, worker.groups, read=read)
    barrier(worker.groups)
    if worker.groups.is_main:
        if rollouts is not None:
            rollouts.finish_saving()
        write_state(partial, state, worker.optimizer.num_steps)
        if (lora := worker.config.model.lora) is not None:
            write_adapter_config(partial, lora, worker.config.model_path)
        flush_to_disk(partial)
        partial.rename(final)
        flush(folder)  # the new name, before older checkpoints are deleted
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    barrier(worker.groups)
    return final


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


def write_state(checkpoint: Path, state: dict[str, Any], adam_step: int) -> None:
    (checkpoint / STATE).write_text(json.dumps({**state, "adam_step": adam_step}, indent=1))


def _stored(adam_step: int) -> tuple[State, ...]:
    return STATES if adam_step else ("main",)


def _write(worker: Worker, state: State, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    worker.optimizer.write(parameter, state, tensor)
