"""The model that `eval` evaluates: a Hugging Face folder, or a checkpoint that is converted to one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console

from megatron_bapo.config.architecture import read_architecture, written_dtype
from megatron_bapo.config.evaluation import EvalConfig, EvaluatedModelConfig
from megatron_bapo.config.model import ModelConfig
from megatron_bapo.config.model_checks import download_hint, model_problems, shape_problems
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError

_MAX_FILE_BYTES = 4 << 30

SERVED_DTYPES = get_args(ModelConfig.model_fields["dtype"].annotation)


@dataclass(frozen=True)
class EvaluatedModel:
    """Folders and dtype of the evaluated model."""

    folder: Path
    """Hugging Face folder that engines load; for a checkpoint, `convert` writes it."""
    weights: Path
    """Folder of the evaluated safetensors files."""
    origin: Path
    """Folder with config.json and tokenizer."""
    dtype: str

    @property
    def is_checkpoint(self) -> bool:
        return self.weights != self.folder

    def serving(self, config: EvalConfig) -> Config:
        return config.serving(self.folder, self.dtype)

    def problems(self, config: EvalConfig) -> Iterator[str]:
        """Yield every broken rule as one line."""
        serving = self.serving(config)
        if self.is_checkpoint:
            yield from shape_problems(serving, read_architecture(self.origin), str(self.origin / "config.json"))
        else:
            yield from model_problems(serving)

    def convert(self, console: Console) -> None:
        """Write a checkpoint as a Hugging Face folder, unless the folder exists. An existing folder is complete."""
        if self.folder.exists():
            return
        import torch

        from megatron_bapo.commands.convert import byte_progress
        from megatron_bapo.trainer.conversion import exported_bytes, hugging_face_from_checkpoint

        dtype: torch.dtype = getattr(torch, self.dtype)
        checkpoint, num_bytes = self.weights.parent, exported_bytes(self.origin, dtype)
        with byte_progress(console, f"converting {checkpoint.name}", num_bytes) as advance:
            hugging_face_from_checkpoint(
                checkpoint, self.origin, self.folder, dtype, max_file_bytes=_MAX_FILE_BYTES, advance=advance
            )


def find_model(settings: EvaluatedModelConfig, converted: Path) -> EvaluatedModel:
    """Return the model at `settings.path`. A checkpoint is to be converted to the Hugging Face folder `converted`.

    Raises UserError if there is no model.
    """
    path = settings.path
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise UserError(
            f"model.path={path} {state}; give a Hugging Face folder, a run directory or a checkpoint (relative paths "
            f"start at {Path.cwd()}){download_hint(path)}"
        )
    if (path / "config.json").is_file():
        return EvaluatedModel(path, path, path, _served(settings.dtype or written_dtype(path)))
    # Deferred because importing Megatron takes seconds, which a Hugging Face folder does not need.
    from megatron_bapo.commands.convert import find_checkpoint
    from megatron_bapo.trainer.checkpoint import WEIGHTS

    found = find_checkpoint(
        path, settings.origin, settings.dtype, origin_option="model.origin", dtype_option="model.dtype"
    )
    return EvaluatedModel(converted, found.checkpoint / WEIGHTS, found.origin, _served(found.dtype))


def _served(dtype: str) -> str:
    if dtype not in SERVED_DTYPES:
        raise UserError(f"the model is in {dtype}; give model.dtype, one of {', '.join(SERVED_DTYPES)}")
    return dtype
