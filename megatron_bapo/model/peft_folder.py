"""Adapters as PEFT folders: initial values, export, and merging into the base model's tensors.

A PEFT folder has `adapter_config.json` and `adapter_model.safetensors`. Checkpoints contain the same config beside
their weights, so that they can be merged or exported without the run's configuration.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from megatron_bapo.files import read_json_object, replace_folder
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.model.hf_export import flush_to_disk, write_safetensors, write_stage
from megatron_bapo.model.hf_import import SafetensorsFolder, Write, load_tensors
from megatron_bapo.model.hf_mapping import Shape, expected_shapes
from megatron_bapo.model.lora_mapping import PEFT_PREFIX
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.parallel.groups import ParallelGroups

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def load_adapters(model: PolicyModel, config: Config, groups: ParallelGroups, *, write: Write) -> None:
    """Call `write(parameter, tensor)` with the initial values of this rank's adapters, if the model has any.

    Raises UserError if the folder `model.lora.path` does not have exactly the configured adapters.
    """
    lora, adapters = config.model.lora, model.adapters
    if lora is None or adapters is None:
        return
    shapes = expected_shapes(model.architecture, adapters.table)
    if lora.path is None:
        load_tensors(adapters, InitialAdapters(shapes, config.seed), groups, write=write)
        return
    _check_scale(read_adapter_config(lora.path), lora)
    with SafetensorsFolder(lora.path) as folder:
        check_adapters(folder.shapes(), shapes, lora.path)
        load_tensors(adapters, PeftTensors(folder), groups, write=write)


@dataclass(frozen=True)
class InitialAdapters:
    """Initial adapters of a whole model by name, the same under every parallel layout: PEFT's, with B = 0.

    A is uniform between -1 / sqrt(inputs) and 1 / sqrt(inputs), as `kaiming_uniform_` with a = sqrt(5) is.
    """

    shapes: dict[str, tuple[int, ...]]
    seed: int

    def slice(self, name: str) -> torch.Tensor:
        """Return a whole tensor, which depends only on its name and the seed."""
        shape = self.shapes[name]
        if ".lora_B." in name:
            return torch.zeros(shape)
        digest = blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()
        bound = 1 / math.sqrt(shape[1])
        return torch.empty(shape).uniform_(
            -bound, bound, generator=torch.Generator().manual_seed(int.from_bytes(digest))
        )


@dataclass(frozen=True)
class PeftTensors:
    """Tensors of a PEFT folder, found without the prefix of PEFT's names."""

    folder: Any
    """`SafetensorsFolder` of the folder."""

    def slice(self, name: str) -> Any:
        """Return a lazy view of one tensor."""
        return self.folder.slice(PEFT_PREFIX + name)


def check_adapters(found: dict[str, Shape], expected: dict[str, Shape], folder: Path) -> None:
    """Check that a PEFT folder has exactly the expected adapters, and raise UserError otherwise."""
    wanted = {PEFT_PREFIX + name: shape for name, shape in expected.items()}
    wrong = sorted(name for name in found.keys() | wanted if found.get(name) != wanted.get(name))
    if wrong:
        name = wrong[0]
        has, needs = (str(list(shapes[name])) if name in shapes else "no such tensor" for shapes in (found, wanted))
        raise UserError(
            f"{folder} has {len(wrong)} tensors that differ from model.lora, first {name}: the folder has {has}, the "
            "configuration needs "
            f"{needs}; set rank and target_modules to those of the folder's adapter_config.json"
        )


def _check_scale(found: LoraConfig, lora: LoraConfig) -> None:
    if found.scale != lora.scale:
        raise UserError(
            f"{lora.path} has adapters of scale {found.alpha:g} / {found.rank}, but model.lora has {lora.alpha:g} / "
            f"{lora.rank}; set model.lora.rank={found.rank} and model.lora.alpha={found.alpha:g}"
        )


def write_adapter_config(folder: Path, lora: LoraConfig, base: Path) -> None:
    """Write PEFT's config of adapters for the model in the Hugging Face folder `base`."""
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": list(lora.target_modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


_UNSUPPORTED = {
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "target_parameters": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
}
"""Options of PEFT that change what an adapter computes, with the only supported value."""
_CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which PEFT also changes the weights that the adapters adapt."""


def read_adapter_config(folder: Path) -> LoraConfig:
    """Return the adapters that a PEFT folder describes. Raises UserError if they are not plain LoRA."""
    path = folder / ADAPTER_CONFIG
    fields = read_json_object(path)
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {fields.get('peft_type')!r}; only LORA is supported")
    for name, only in _UNSUPPORTED.items():
        if fields.get(name) not in (only, None):
            raise UserError(f"{path}: {name} is {fields[name]!r}, but only {only!r} is supported; merge these adapters")
    if str(initialized := fields.get("init_lora_weights")).lower().startswith(_CHANGING_THE_BASE):
        raise UserError(
            f"{path}: init_lora_weights is {initialized!r}, so these adapters belong to other weights than the base "
            "model's; convert them with PEFT (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    try:
        return LoraConfig.model_validate(
            {
                "rank": fields["r"],
                "alpha": fields["lora_alpha"],
                "dropout": fields.get("lora_dropout", 0.0),
                "target_modules": tuple(sorted(fields["target_modules"])),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not describe supported adapters: {error}") from None


def save_adapters(model: PolicyModel, lora: LoraConfig, groups: ParallelGroups, base: Path, target: Path) -> None:
    """Write the adapters as the PEFT folder `target`, whose config names the Hugging Face folder `base`. Collective.

    The folder is written as `target` + `.partial` and renamed when it is complete.
    """
    partial = target.with_name(target.name + ".partial")
    stages = partial / "stages"
    assert model.adapters is not None, "the model has no adapters"
    if groups.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        stages.mkdir(parents=True)
    barrier(groups)
    write_stage(stages, model.adapters, groups)
    barrier(groups)
    if groups.is_main:
        with SafetensorsFolder(stages) as folder:
            write_peft_folder(partial, folder, lora, base, model.config.params_dtype)
        shutil.rmtree(stages)
        replace_folder(target, partial)
    barrier(groups)


def write_peft_folder(
    folder: Path, tensors: SafetensorsFolder, lora: LoraConfig, base: Path, dtype: torch.dtype
) -> None:
    """Write adapters, named as in checkpoints, to the existing `folder` in PEFT's format."""
    shapes = {PEFT_PREFIX + name: shape for name, shape in tensors.shapes().items()}

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for name in shapes:
            yield name, tensors.slice(name.removeprefix(PEFT_PREFIX))[:].to(dtype)

    write_safetensors(folder / ADAPTER_WEIGHTS, shapes, read())
    write_adapter_config(folder, lora, base)
    flush_to_disk(folder)


@dataclass(frozen=True)
class MergedTensors:
    """The tensors of a base model with adapters merged, W + scale * B A in fp32; like `SafetensorsFolder`."""

    base: SafetensorsFolder
    adapters: SafetensorsFolder
    lora: LoraConfig

    def shapes(self) -> dict[str, Shape]:
        return self.base.shapes()

    def slice(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        value, module = self.base.slice(name)[:], name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in self.adapters.shapes():
            return value
        a, b = (self.adapters.slice(f"{module}.lora_{half}.weight")[:].float() for half in "AB")
        return value.float() + self.lora.scale * b @ a
