"""The only file that knows whether there is a GPU."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def has_gpu() -> bool:
    return torch.cuda.is_available()


def local_device() -> torch.device:
    """This rank's device; torchrun's LOCAL_RANK names the GPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu() else torch.device("cpu")


def start_distributed(timeout_s: float, store_file: Path | None = None) -> None:
    """Join the process group that torchrun describes in the environment: NCCL on GPUs, gloo on CPUs.

    With `store_file` the ranks, all on this machine, meet in a file instead of a TCP store, which would listen on every
    interface.
    """
    if has_gpu():
        torch.cuda.set_device(local_device())
    else:
        torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu() else "gloo",
        timeout=timedelta(seconds=timeout_s),
        init_method="env://" if store_file is None else f"file://{store_file}",
        rank=rank,
        world_size=world_size,
    )


def now_s() -> float:
    """A clock for phase times, in seconds; waits for the device's queued work first."""
    if has_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def num_gpus() -> int:
    return torch.cuda.device_count()


def host_buffer(num_bytes: int) -> torch.Tensor:
    """Uninitialised bytes in host memory, page-locked where a GPU copies from and to them."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_gpu())


def release_cached_memory() -> None:
    """Give freed device memory back to the device, where other processes can have it; waits for queued work."""
    if has_gpu():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
