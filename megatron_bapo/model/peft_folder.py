"""Initial adapters: PEFT's random ones, or those of a PEFT folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from megatron_bapo.model.build import PolicyModel
from megatron_bapo.model.hf_import import SafetensorsFolder, Write, load_tensors
from megatron_bapo.model.hf_mapping import Shape, expected_shapes
from megatron_bapo.model.lora_mapping import PEFT_PREFIX
from megatron_bapo.parallel.groups import ParallelGroups


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
