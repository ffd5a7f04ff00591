"""The architecture of a configuration's model and teacher, also if the checkpoint itself is on another machine."""

from __future__ import annotations

import difflib
from functools import lru_cache
from pathlib import Path

from megatron_bapo.config.architecture import Architecture, read_architecture
from megatron_bapo.config.model import ModelConfig
from megatron_bapo.config.model_checks import TEACHER, created_architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError

FOLDER = Path(__file__).parent / "architectures"
"""One folder per published model, named as on the Hugging Face Hub, with the fields of its config.json that the planner
reads. README.md there names the sources."""
SAME_CONFIG = {
    "GLM-4.5-Air-Base": "GLM-4.5-Air",
    "Qwen2.5-3B-Instruct": "Qwen2.5-3B",
    "Qwen2.5-Math-1.5B-Instruct": "Qwen2.5-Math-1.5B",
    "Qwen2.5-Math-7B-Instruct": "Qwen2.5-Math-7B",
    "Qwen3-30B-A3B-Instruct-2507": "Qwen3-30B-A3B-Thinking-2507",
    "Qwen3-Next-80B-A3B-Thinking": "Qwen3-Next-80B-A3B-Instruct",
    "DeepSeek-R1-Distill-Qwen-14B": "Qwen2.5-14B",
}
"""Published models whose fields are those of another model in `FOLDER`."""
_NEAR = 0.75
"""Similarity from which a known name is suggested for an unknown one."""


def known_models() -> list[str]:
    """Return the names of all published models whose architecture is known, sorted."""
    return sorted([*(folder.name for folder in FOLDER.iterdir() if folder.is_dir()), *SAME_CONFIG])


def architecture_of(model: ModelConfig) -> tuple[Architecture, str]:
    """Return the architecture and where it comes from.

    It is read from the model's folder. If that folder is not here, the last part of `model.path` is looked up among the
    known models, without regard to case; so a model id of the Hugging Face Hub works as well.

    Raises UserError for a model that is neither here nor known by name, and for a config.json that is not supported.
    """
    if model.create is not None:
        return created_architecture(model.create), "model.create"
    assert model.path is not None, "the schema requires path or create"
    return _architecture_at("model.path", model.path)


def teacher_of(config: Config) -> Architecture | None:
    """Return the architecture of the teacher, or None without `algorithm.distillation`; found as the model's is."""
    distillation = config.algorithm.distillation
    return None if distillation is None else _teacher_at(distillation.teacher)


@lru_cache(maxsize=16)
def _teacher_at(path: Path) -> Architecture:
    return _architecture_at(TEACHER, path)[0]


def _architecture_at(key: str, path: Path) -> tuple[Architecture, str]:
    if (path / "config.json").is_file():
        return read_architecture(path), str(path / "config.json")
    by_lower_case = {name.lower(): name for name in known_models()}
    name = by_lower_case.get(path.name.lower())
    if name is not None:
        return read_architecture(FOLDER / SAME_CONFIG.get(name, name)), f"{name}, as published"
    near = difflib.get_close_matches(path.name.lower(), by_lower_case, n=1, cutoff=_NEAR)
    meant = f"; did you mean {by_lower_case[near[0]]}?" if near else "."
    raise UserError(
        f"{key}={path} has no config.json here, and {path.name} is not among the models whose architecture is "
        f"known{meant} Copy the checkpoint's config.json into that folder, or name one of the known models: "
        f"{', '.join(known_models())}"
    )
