"""Save the results of GPU checks and GPU benchmarks with the package versions that they depend on."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from megatron_bapo.parallel.platform import has_gpu
from megatron_bapo.parallel.telemetry import open_nvml

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
PACKAGES = ("torch", "triton", "transformer-engine", "megatron-core", "vllm", "nvidia-ml-py", "apex")


def save(name: str, found: Mapping[str, object], folder: Path = RESULTS) -> None:
    """Write `folder`/`name`.json, replacing an earlier one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"versions": versions(), **found}, indent=2) + "\n", "utf-8")


@cache
def versions() -> dict[str, str]:
    """Return the versions that figures depend on, with the GPU's name."""
    found = {"gpu": torch.cuda.get_device_name() if has_gpu() else "none", "python": platform.python_version()}
    found["cuda"] = str(torch.version.cuda)
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    if (nvml := open_nvml()) is not None:
        found["driver"] = str(nvml.nvmlSystemGetDriverVersion())
    return found
