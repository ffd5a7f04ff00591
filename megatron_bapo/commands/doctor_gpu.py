"""GPU checks of the doctor: use by torch, health, and the fused kernels that a run would use.

Modules that need torch are imported inside the functions, because a failing import may be the problem.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megatron_bapo.commands.finding import Finding

if TYPE_CHECKING:
    from megatron_bapo.parallel.telemetry import GpuReading


def gpu_findings(installed: Mapping[str, str], *, apex: bool) -> Iterator[Finding]:
    """Yield all GPU findings. `installed` maps distributions to versions; `apex` is True for NVIDIA's apex."""
    try:
        from megatron_bapo.parallel.platform import has_gpu
        from megatron_bapo.parallel.telemetry import open_nvml, read_all_gpus
    except (ImportError, OSError, RuntimeError) as error:
        yield Finding("accelerator", "problem", f"torch cannot be imported: {error}", "run `make clean setup`")
        return
    nvml = open_nvml()
    readings = None if nvml is None else read_all_gpus(nvml)
    driver = None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())
    yield accelerator(has_gpu(), readings, driver, installed.get("torch", "?"))
    yield from gpu_health(readings or ())
    yield fused_paths(installed, gpu=has_gpu(), apex=apex)


def accelerator(
    torch_sees_gpu: bool, readings: Sequence[GpuReading] | None, driver: str | None, torch_version: str
) -> Finding:
    """Check that torch can use the GPUs that the driver reports. `readings` is None without nvidia-ml-py or driver."""
    found = ""
    if readings:
        names = ", ".join(f"{r.name} with {r.memory_total_gib or 0:.0f} GiB" for r in readings)
        found = f"{len(readings)} GPU{'s' if len(readings) > 1 else ''}: {names}; driver {driver}"
    if torch_sees_gpu:
        return Finding("accelerator", "ok", found or "torch finds a GPU (install nvidia-ml-py for details)")
    if found:
        return Finding(
            "accelerator",
            "problem",
            f"{found}, but torch {torch_version} cannot use it",
            "install the GPU lock (requirements.txt), check CUDA_VISIBLE_DEVICES and that the driver is new enough",
        )
    return Finding("accelerator", "ok", "no GPU: the same code runs on the CPU cores (gloo)")


def gpu_health(readings: Sequence[GpuReading]) -> Iterator[Finding]:
    """Yield a row for each unhealthy GPU, by the rules with which trainer ranks check their GPU at the start."""
    from megatron_bapo.parallel.device_check import reading_problems, reading_warnings, suggested_action

    num_healthy = 0
    for index, reading in enumerate(readings):
        problems, warnings = list(reading_problems(reading)), list(reading_warnings(reading))
        num_healthy += not (problems or warnings)
        if problems:
            found = f"{reading.name} {reading.uuid}: {'; '.join(problems)}"
            yield Finding(f"GPU {index}", "problem", found, suggested_action(socket.gethostname(), reading.uuid))
        if warnings:
            found = f"{reading.name} {reading.uuid}: {'; '.join(warnings)}"
            yield Finding(f"GPU {index}", "warning", found, "check cooling and power: every rank waits for this one")
    if num_healthy:
        found = f"{num_healthy} of {len(readings)} without ECC errors, pending repairs or slow clocks"
        yield Finding("GPU health", "ok", found)


def fused_paths(installed: Mapping[str, str], *, gpu: bool, apex: bool) -> Finding:
    """Report which library's fused kernels a run would use; a run's trainer log names those that it uses.

    Megatron-Core's optimizer prefers Transformer Engine's Adam to apex's, and apex's to torch's.
    """
    engine = installed.get("transformer-engine") if gpu else None
    apex = apex and gpu
    adam = f"Transformer Engine {engine}" if engine else "apex" if apex else "torch"
    loss = f"Triton {installed['triton']}" if gpu and "triton" in installed else "torch"
    norms = f"Transformer Engine {engine} or, in local layers, torch" if engine else "torch"
    return Finding("fused kernels", "ok", f"Adam: {adam}; norms: {norms}; log-probs, entropy and loss: {loss}")
