"""NVML that answers from a file, in place of a driver."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml


class ScriptedNvml:
    """nvidia-ml-py's constants and errors; what is asked of a device comes from `nvml_h200.json`, in its answers' form.

    There, 0 is a sound GPU under load, 1 one that is hot and broken, 2 a slice (MIG), of which little is told. A list
    stands for a call's further arguments: [[[arguments], answer], ...]. What is not there is not supported.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, index: int) -> None:
        recorded = json.loads(Path(__file__).with_name("nvml_h200.json").read_text(encoding="utf-8"))
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
