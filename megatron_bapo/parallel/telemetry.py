"""What the driver says of a rank's GPU while it works, by NVML (nvidia-ml-py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_bapo.parallel.platform import device_uuid

GIB = 2**30
SAMPLE_EVERY_S = 1.0
"""NVML's utilisation is that of the last sixth of a second to second, depending on the GPU."""

SLOWDOWNS = {
    "nvmlClocksEventReasonSwThermalSlowdown": "too hot (software slowdown)",
    "nvmlClocksEventReasonHwThermalSlowdown": "too hot (hardware slowdown)",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""Reasons for low clocks that healthy, cooled hardware does not have; its power limit is none of them."""


@dataclass(frozen=True)
class GpuReading:
    """One look at one GPU; None is what the GPU does not tell."""

    uuid: str
    name: str
    utilization: float | None
    """Part of the last moment in which some kernel ran, 0 to 1."""
    memory_used_gib: float | None
    """By all processes."""
    memory_total_gib: float | None
    power_w: float | None
    power_limit_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    max_sm_clock_mhz: float | None
    corrected_ecc: int | None
    """Errors since the driver was loaded; so is the next."""
    uncorrected_ecc: int | None
    repair_pending: bool | None
    """Rows of memory wait for a reset of the GPU to be replaced."""
    repair_failed: bool | None
    slowdowns: tuple[str, ...]


def open_nvml() -> Any | None:
    """NVML, initialised; None without nvidia-ml-py or a driver."""
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return None
    except Exception as error:  # the module's own NVMLError is known only once it is there
        if type(error).__module__ != "pynvml":
            raise
        return None
    return nvml


def read_gpu(nvml: Any, handle: Any) -> GpuReading:
    """One reading; what this GPU or driver does not support is None."""

    def ask(function: str, *arguments: Any) -> Any | None:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except nvml.NVMLError:
            return None

    def scaled(value: Any | None, factor: float = 1.0) -> float | None:
        return None if value is None else float(value) * factor

    memory, utilization = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetUtilizationRates")
    rows, reasons = ask("nvmlDeviceGetRemappedRows"), ask("nvmlDeviceGetCurrentClocksEventReasons")
    return GpuReading(
        uuid=str(ask("nvmlDeviceGetUUID")),
        name=str(ask("nvmlDeviceGetName")),
        utilization=None if utilization is None else utilization.gpu / 100,
        memory_used_gib=None if memory is None else memory.used / GIB,
        memory_total_gib=None if memory is None else memory.total / GIB,
        power_w=scaled(ask("nvmlDeviceGetPowerUsage"), 1e-3),
        power_limit_w=scaled(ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
        temperature_c=scaled(ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)),
        sm_clock_mhz=scaled(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)),
        max_sm_clock_mhz=scaled(ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)),
        corrected_ecc=_ecc_errors(nvml, ask, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        uncorrected_ecc=_ecc_errors(nvml, ask, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        repair_pending=None if rows is None else bool(rows[2]),
        repair_failed=None if rows is None else bool(rows[3]),
        slowdowns=tuple(text for bit, text in SLOWDOWNS.items() if (reasons or 0) & getattr(nvml, bit)),
    )


def _ecc_errors(nvml: Any, ask: Callable[..., Any], kind: int) -> int | None:
    return ask("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC)


def read_all_gpus(nvml: Any) -> list[GpuReading]:
    """Of this machine, whichever this process may use."""
    return [read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]


class Telemetry:
    """Reads this rank's GPU every second in a thread of its own, between `take` and `take`."""

    def __init__(self, read: Callable[[], GpuReading], every_s: float = SAMPLE_EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._readings: list[GpuReading] = []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-telemetry", daemon=True)
        self._thread.start()

    def take(self) -> list[GpuReading]:
        """The readings since the last call."""
        with self._lock:
            readings, self._readings = self._readings, []
        return readings

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            reading = self._read()
            with self._lock:
                self._readings.append(reading)


def start_telemetry() -> Telemetry | None:
    """Of this rank's GPU; None where there is none, or nothing to read it by."""
    uuid, nvml = device_uuid(), open_nvml()
    if uuid is None or nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None
    return Telemetry(lambda: read_gpu(nvml, handle))
