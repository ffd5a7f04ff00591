"""Checks every rank's GPU before training starts, so that a faulty GPU is named in the error.

The inputs are NVML readings and a small self-test on the GPU; pure functions evaluate them.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_bapo.errors import RunError
from megatron_bapo.parallel.platform import (
    claim_device,
    device_uuid,
    free_memory_bytes,
    local_device,
    num_visible_gpus,
    release_cached_memory,
)
from megatron_bapo.parallel.telemetry import GpuReading, open_nvml, read_gpu

MATRIX_SIZE = 1024
NUM_PRODUCTS = 20
TOUCHED_BYTES = 2 << 30
"""Upper limit of the memory that the self-test uses; it takes at most half of the free memory."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """Results of a GPU self-test with known answers."""

    num_wrong_products: int
    """Number of wrong elements in exact matrix products."""
    num_products: int
    """Number of elements computed."""
    num_wrong_bytes: int
    """Number of bytes that differ from what was written."""
    num_bytes: int
    """Number of bytes written."""


def count_problem(local_rank: int, ranks_per_host: int, num_visible: int) -> str | None:
    """Return the problem if the ranks of a host do not each have their own GPU."""
    if num_visible >= ranks_per_host > local_rank:
        return None
    return (
        f"there are {ranks_per_host} trainer ranks on this host, but local rank {local_rank} sees {num_visible} GPUs; "
        "each rank needs its own GPU; compare `nvidia-smi -L` with CUDA_VISIBLE_DEVICES and the job's GPUs per node"
    )


def reading_problems(reading: GpuReading) -> Iterator[str]:
    """Iterate over the problems in a reading that disqualify a GPU."""
    if reading.uncorrected_ecc:
        yield f"{reading.uncorrected_ecc} uncorrected ECC errors since the driver was loaded"
    if reading.repair_failed:
        yield "remapping a faulty memory row failed"
    if reading.repair_pending:
        yield "a faulty memory row needs a GPU reset to be remapped"


def reading_warnings(reading: GpuReading) -> Iterator[str]:
    """Iterate over the conditions in a reading that slow a GPU down, and with it every rank that waits for it."""
    for slowdown in reading.slowdowns:
        yield f"its clocks are reduced: {slowdown}"


def trial_problems(trial: Trial) -> Iterator[str]:
    """Iterate over the failures of a self-test."""
    if trial.num_wrong_products:
        yield f"{trial.num_wrong_products} of {trial.num_products} elements of matrix products are wrong"
    if trial.num_wrong_bytes:
        yield f"{trial.num_wrong_bytes} of {trial.num_bytes} bytes of its memory differ from what was written"


def suggested_action(host: str, uuid: str) -> str:
    """Return the suggested action for a faulty GPU."""
    return (
        f"exclude the host (Slurm: --exclude={host}), or reset the GPU (nvidia-smi --gpu-reset -i {uuid}) and test "
        "it (dcgmi diag -r 3)"
    )


def run_trial(device: torch.device, num_bytes: int) -> Trial:
    """Compute exact matrix products in bfloat16, and write memory and read it back.

    The factors are -1, 0 and 1, so every sum is a small integer that bfloat16 represents exactly.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randint(-1, 2, (2, MATRIX_SIZE, MATRIX_SIZE), generator=generator).float()
    expected = (left @ right).to(device)
    left, right = left.to(device, torch.bfloat16), right.to(device, torch.bfloat16)
    wrong = sum(int(((left @ right).float() != expected).sum()) for _ in range(NUM_PRODUCTS))
    memory = torch.empty(num_bytes // 8, dtype=torch.int64, device=device)
    num_wrong_bytes = 0
    for pattern in (0x5555555555555555, -0x5555555555555556):
        memory.fill_(pattern)
        num_wrong_bytes += 8 * int((memory != pattern).sum())
    return Trial(wrong, NUM_PRODUCTS * expected.numel(), num_wrong_bytes, 2 * 8 * memory.numel())


def check_device() -> None:
    """Check this rank's GPU; do nothing without a GPU.

    Raises RunError if the GPU is missing, reports errors, or computes wrong results.
    """
    num_visible = num_visible_gpus()
    if num_visible == 0:
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    host, ranks_per_host = socket.gethostname(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if problem := count_problem(local_rank, ranks_per_host, num_visible):
        raise RunError(f"{host}: {problem}")
    claim_device()
    uuid, reading = device_uuid(), None
    assert uuid is not None, "a visible GPU has a UUID"
    if (nvml := open_nvml()) is not None:
        try:
            reading = read_gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        except nvml.NVMLError as error:
            log.warning("NVML does not find %s: %s", uuid, error)
    trial = run_trial(local_device(), min(TOUCHED_BYTES, free_memory_bytes() // 2))
    release_cached_memory()
    problems = [*(reading_problems(reading) if reading else ()), *trial_problems(trial)]
    if problems:
        name = reading.name if reading else "GPU"
        raise RunError(f"{name} {uuid} on {host}: {'; '.join(problems)}; {suggested_action(host, uuid)}")
    for warning in reading_warnings(reading) if reading else ():
        log.warning("%s on %s: %s", uuid, host, warning)
