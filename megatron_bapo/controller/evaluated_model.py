"""The model that `eval` names: a Hugging Face folder, or a checkpoint that becomes one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.evaluation import EvalConfig, EvaluatedModelConfig
from megatron_bapo.config.model_checks import model_problems, shape_problems
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.conversion import byte_progress, find_checkpoint, total_bytes, written_dtype
from megatron_bapo.errors import UserError
from megatron_bapo.trainer.checkpoint import WEIGHTS
from megatron_bapo.trainer.conversion import hugging_face_from_checkpoint

_MAX_FILE_BYTES = 4 << 30


@dataclass(frozen=True)
class EvaluatedModel:
    folder: Path
    """What engines load; of a checkpoint it is still to be written."""
    weights: Path
    """Folder of the safetensors files that are evaluated."""
    origin: Path
    """Folder of config.json and tokenizer."""
    dtype: str

    @property
    def is_checkpoint(self) -> bool:
        return self.weights != self.folder

    def serving(self, config: EvalConfig) -> Config:
        return config.serving(self.folder, self.dtype)

    def problems(self, config: EvalConfig) -> Iterator[str]:
        """Every broken rule, one line each."""
        serving = self.serving(config)
        if self.is_checkpoint:
            yield from shape_problems(serving, read_architecture(self.origin), str(self.origin / "config.json"))
        else:
            yield from model_problems(serving)

    def convert(self, console: Console) -> None:
        """Write a checkpoint as a Hugging Face folder, unless that is there: what has its name is whole."""
        if self.folder.exists():
            return
        dtype: torch.dtype = getattr(torch, self.dtype)
        checkpoint, num_bytes = self.weights.parent, total_bytes(self.origin, dtype.itemsize)
        with byte_progress(console, f"converting {checkpoint.name}", num_bytes) as advance:
            hugging_face_from_checkpoint(
                checkpoint, self.origin, self.folder, dtype, max_file_bytes=_MAX_FILE_BYTES, advance=advance
            )


def find_model(settings: EvaluatedModelConfig, converted: Path) -> EvaluatedModel:
    """The model at `settings.path`; of a checkpoint `converted` will be the Hugging Face folder.

    Raises UserError when there is none.
    """
    path = settings.path
    if not path.exists():
        raise UserError(
            f"model.path={path} does not exist; give a Hugging Face folder, a run directory or a checkpoint (relative "
            f"paths start at {Path.cwd()})"
        )
    if (path / "config.json").is_file():
        return EvaluatedModel(path, path, path, settings.dtype or written_dtype(path))
    found = find_checkpoint(path, settings.origin, settings.dtype)
    return EvaluatedModel(converted, found.checkpoint / WEIGHTS, found.origin, found.dtype)
