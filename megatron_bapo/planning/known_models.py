"""The architecture that a configuration means, also where the checkpoint itself is on another machine."""

from __future__ import annotations

from pathlib import Path

from megatron_bapo.config.architecture import Architecture, read_architecture
from megatron_bapo.config.model_checks import created_architecture
from megatron_bapo.config.schema import ModelConfig
from megatron_bapo.errors import UserError

FOLDER = Path(__file__).parent / "architectures"
"""One folder for each model whose shape is published, named as on Hugging Face, with the part of its config.json that
says it."""


def known_models() -> list[str]:
    return sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())


def architecture_of(model: ModelConfig) -> tuple[Architecture, str]:
    """The architecture and where it is from: the model's folder, or its name where the folder is not here.

    Raises UserError for a folder that is neither here nor known by name, and for a config.json that is not supported.
    """
    if model.create is not None:
        return created_architecture(model.create), "model.create"
    path = model.path
    assert path is not None, "the schema requires path or create"
    if (path / "config.json").is_file():
        return read_architecture(path), str(path / "config.json")
    if (FOLDER / path.name).is_dir():
        return read_architecture(FOLDER / path.name), f"{path.name}, as published"
    raise UserError(
        f"model.path={path} has no config.json here, and {path.name} is not among the models whose shape is known "
        f"({', '.join(known_models())}); copy the checkpoint's config.json into that folder, or name the folder "
        "like one of these"
    )
