"""GPU telemetry of a rank from the driver, through NVML (nvidia-ml-py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megatron_bapo.parallel.platform import device_uuid

GIB = 2**30
SAMPLE_EVERY_S = 1.0
"""Sampling interval; NVML averages utilization over the last 1/6 s to 1 s, depending on the GPU."""

SLOWDOWNS = {
    "nvmlClocksEventReasonSwThermalSlowdown": "too hot (software slowdown)",
    "nvmlClocksEventReasonHwThermalSlowdown": "too hot (hardware slowdown)",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "power brake",
}
"""Reasons for reduced clocks that indicate a hardware or cooling problem; the regular power limit is not one."""


@dataclass(frozen=True)
class GpuReading:
    """One reading of one GPU; values that the GPU does not report are None."""

    uuid: str
    name: str
    utilization: float | None
    """Fraction of NVML's last sampling period in which some kernel ran, 0 to 1."""
    memory_used_gib: float | None
    """Memory used by all processes."""
    memory_total_gib: float | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_mhz: float | None
    corrected_ecc: int | None
    """Corrected ECC errors since the driver was loaded."""
    uncorrected_ecc: int | None
    """Uncorrected ECC errors since the driver was loaded."""
    repair_pending: bool | None
    """Whether memory rows will be remapped at the next GPU reset."""
    repair_failed: bool | None
    """Whether remapping a memory row failed."""
    slowdowns: tuple[str, ...]


def open_nvml() -> Any | None:
    """Return the initialized NVML module, or None without nvidia-ml-py or a driver."""
    try:
        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return None
    except Exception as error:  # NVMLError cannot be named before the module is imported
        if type(error).__module__ != "pynvml":
            raise
        return None
    return nvml


def read_gpu(nvml: Any, handle: Any) -> GpuReading:
    """Read one GPU; values that this GPU or driver does not support are None."""

    def query(function: str, *arguments: Any) -> Any | None:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except nvml.NVMLError:
            return None

    def scaled(value: Any | None, factor: float = 1.0) -> float | None:
        return None if value is None else float(value) * factor

    memory, utilization = query("nvmlDeviceGetMemoryInfo"), query("nvmlDeviceGetUtilizationRates")
    rows, reasons = query("nvmlDeviceGetRemappedRows"), query("nvmlDeviceGetCurrentClocksEventReasons")
    return GpuReading(
        uuid=str(query("nvmlDeviceGetUUID")),
        name=str(query("nvmlDeviceGetName")),
        utilization=None if utilization is None else utilization.gpu / 100,
        memory_used_gib=None if memory is None else memory.used / GIB,
        memory_total_gib=None if memory is None else memory.total / GIB,
        power_w=scaled(query("nvmlDeviceGetPowerUsage"), 1e-3),
        temperature_c=scaled(query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU)),
        sm_clock_mhz=scaled(query("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)),
        corrected_ecc=_ecc_errors(nvml, query, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        uncorrected_ecc=_ecc_errors(nvml, query, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        repair_pending=None if rows is None else bool(rows[2]),
        repair_failed=None if rows is None else bool(rows[3]),
        slowdowns=tuple(text for bit, text in SLOWDOWNS.items() if (reasons or 0) & getattr(nvml, bit)),
    )


def _ecc_errors(nvml: Any, query: Callable[..., Any], kind: int) -> int | None:
    return query("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC)


def read_all_gpus(nvml: Any) -> list[GpuReading]:
    """Read all GPUs of this machine, including those that are not visible to this process."""
    return [read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]


class Telemetry:
    """Reads this rank's GPU every second in a background thread and collects the readings until `take` is called."""

    def __init__(self, read: Callable[[], GpuReading], every_s: float = SAMPLE_EVERY_S) -> None:
        self._read, self._every_s = read, every_s
        self._readings: list[GpuReading] = []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-telemetry", daemon=True)
        self._thread.start()

    def take(self) -> list[GpuReading]:
        """Return the readings since the last call."""
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
    """Start telemetry of this rank's GPU; return None without a GPU or without NVML."""
    uuid, nvml = device_uuid(), open_nvml()
    if uuid is None or nvml is None:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None
    return Telemetry(lambda: read_gpu(nvml, handle))
