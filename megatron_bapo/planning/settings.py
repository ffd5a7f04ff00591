"""Configurations with other values of some keys, and the overrides that select them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from megatron_bapo.config.schema import Config
from megatron_bapo.config.section import Section

Settings = dict[str, dict[str, Any]]
"""New values of keys, by section."""
Placement = Literal["colocated", "separate"]
"""`colocated`: the engines share the trainer's GPUs. They sleep during training if rollout.sleep_level > 0; the
trainer's parameters, gradients and optimizer state stay on the GPU during generation, or go to host memory with
trainer.offload. `separate`: the engines have GPUs of their own."""


def with_settings(config: Config, settings: Settings) -> Config:
    """Return the configuration with some keys of some sections replaced, validated again."""
    sections = {name: _replaced(getattr(config, name), values) for name, values in settings.items()}
    return config.model_copy(update=sections)


def _replaced(section: Section, values: dict[str, Any]) -> Section:
    """Return the section with new values; keys that are not set remain so for the warnings of `idle_keys.py`."""
    return section.model_validate(section.model_dump(exclude_unset=True) | values)


def with_placement(config: Config, placement: Placement) -> Config:
    """Return the configuration with its engines placed so, and without the settings that the placement does not allow.

    Source of these: `colocation_problems` in config/colocation_checks.py.
    """
    if config.rollout.colocate == (placement == "colocated"):
        return config
    if placement == "colocated":
        settings, refused = Settings(rollout={"colocate": True}), "nccl"
    else:
        settings = Settings(rollout={"colocate": False, "sleep_level": 0}, trainer={"offload": False})
        refused = "cuda_ipc"
    if config.weight_sync.transport == refused:
        settings["weight_sync"] = {"transport": "store"}
    return with_settings(config, settings)


def changes(old: Config, new: Config) -> list[str]:
    """Return the overrides that turn one configuration into another."""
    return list(_changes("", old, new))


def _changes(prefix: str, old: Section, new: Section) -> Iterator[str]:
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, Section) and isinstance(after, Section):
            yield from _changes(f"{prefix}{name}.", before, after)
        else:
            yield f"{prefix}{name}={_written(after)}"


def _written(value: Any) -> str:
    """Return the value as YAML on the command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(_written, value))}]"
    return json.dumps(value, default=str).strip('"')
