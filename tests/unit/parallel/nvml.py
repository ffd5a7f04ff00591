"""A replacement for NVML that returns recorded readings from a file."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml


class ScriptedNvml:
    """nvidia-ml-py's constants and errors, with device readings from `nvml_readings.json`.

    GPU 0 is an H200 under load and GPU 1 one that is hot and broken; both are invented. GPU 2 is an A100 partitioned
    with MIG and GPU 3 a workstation's RTX PRO 6000 without ECC; these are real readings of nvidia-smi, which uses NVML
    (drivers 535.54.03 and 590.44.01; testdata of influxdata/telegraf, plugins/inputs/nvidia_smi). A list gives results
    by further arguments of a call: [[[arguments], result], ...]. Functions that are missing are unsupported.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, index: int) -> None:
        recorded = json.loads(Path(__file__).with_name("nvml_readings.json").read_text(encoding="utf-8"))
        self._calls: dict[str, Any] = recorded["gpus"][index]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDevice"):
            return getattr(pynvml, name)
        assert hasattr(pynvml, name), f"nvidia-ml-py has no {name}"

        def answer(_handle: Any, *arguments: Any) -> Any:
            found = self._calls.get(name)
            if name in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetClockInfo") and found is not None:
                found = {tuple(key): value for key, value in found}.get(arguments)
            if found is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return SimpleNamespace(**found) if isinstance(found, dict) else found

        return answer
