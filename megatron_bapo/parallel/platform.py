"""The only file that knows whether there is a GPU."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.profiler import ProfilerActivity, profile

from megatron_bapo.errors import RunError

SNAPSHOT_ENTRIES = 1_000_000
"""Allocations and frees that a memory snapshot keeps, the latest; some 100 bytes of stack each."""

SMALLEST_PIECE = 1 << 20
"""Bytes of host memory that are not worth cutting up."""


def has_gpu() -> bool:
    return torch.cuda.is_available()


def compute_capability() -> tuple[int, int] | None:
    """Of the first GPU; None without one."""
    return torch.cuda.get_device_capability(0) if has_gpu() else None


def has_transformer_engine() -> bool:
    """Whether it is installed; not whether it can be imported."""
    return find_spec("transformer_engine") is not None


def local_device() -> torch.device:
    """This rank's device; torchrun's LOCAL_RANK names the GPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu() else torch.device("cpu")


def claim_device() -> None:
    """Make this rank's GPU the current one; comes before anything else uses a GPU. Nothing without one.

    Otherwise every rank of a host leaves a context on its first GPU.
    """
    if has_gpu():
        torch.cuda.set_device(local_device())


def runs_triton() -> bool:
    """Whether Triton can compile kernels for this process's device; its interpreter does not count."""
    return has_gpu() and find_spec("triton") is not None


def start_distributed(timeout_s: float, store_file: Path | None = None) -> None:
    """Join the process group that torchrun describes in the environment: NCCL on GPUs, gloo on CPUs.

    With `store_file` the ranks, all on this machine, meet in a file instead of torchrun's TCP store, which would listen
    on every interface.
    """
    claim_device()
    if not has_gpu():
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


def visible_devices() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (names.split(",") if names else [str(index) for index in range(1024)])[: torch.cuda.device_count()]


def device_name() -> str | None:
    """Of this rank's GPU as its driver gives it, e.g. NVIDIA H100 80GB HBM3."""
    return torch.cuda.get_device_name(local_device()) if has_gpu() else None


def device_uuid() -> str | None:
    """Of this rank's GPU as NVML spells it."""
    return f"GPU-{torch.cuda.get_device_properties(local_device()).uuid}" if has_gpu() else None


def num_visible_gpus() -> int:
    return torch.cuda.device_count() if has_gpu() else 0


def free_memory_bytes() -> int:
    """Of this rank's GPU, all processes considered; 0 without one."""
    return torch.cuda.mem_get_info(local_device())[0] if has_gpu() else 0


def take_peak_memory() -> tuple[int, int] | None:
    """Most bytes (allocated, reserved) by torch on this rank's GPU since the last call."""
    if not has_gpu():
        return None
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peaks


@contextmanager
def memory_snapshot(file: Path) -> Iterator[None]:
    """Write every allocation of the block, with its stack, for pytorch.org/memory_viz; nothing without a GPU.

    The file is torch's own pickle. Nothing here ever reads one.
    """
    if not has_gpu():
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def profiled(file: Path) -> Iterator[None]:
    """Write what torch does on the CPU, and on the GPU where there is one, in the block: a Chrome trace, gzipped where
    the file's name ends in .gz. A block that fails leaves none.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu() else [])]
    with profile(activities=activities) as profiler:
        yield
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))


def host_buffers(num_bytes: int) -> list[torch.Tensor]:
    """So many uninitialised bytes of host memory, in pieces, page-locked where a GPU copies from and to them.

    Torch takes page-locked memory in powers of two: one piece would cost up to twice its size.
    """
    sizes = []
    while (left := num_bytes - sum(sizes)) > 0:
        sizes.append(left if left <= SMALLEST_PIECE else 1 << left.bit_length() - 1)
    return [torch.empty(size, dtype=torch.uint8, pin_memory=has_gpu()) for size in sizes]


def release_cached_memory() -> None:
    """Give freed device memory back to the device, where other processes can have it; waits for queued work."""
    if has_gpu():
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def share_storage(storage: torch.UntypedStorage) -> list[Any]:
    """What another process on this machine opens the storage by, in JSON's types; on a CPU it moves to shared memory.

    After torch/multiprocessing/reductions.py. The memory is freed when both sides have given it up.
    """
    if storage.device.type == "cpu":
        manager, handle, size = storage._share_filename_cpu_()
        return [_text(manager), _text(handle), size]
    index, *fields = storage._share_cuda_()
    fields = [_text(field) if isinstance(field, bytes) else field for field in fields]
    return [str(torch.cuda.get_device_properties(index).uuid), *fields]


def open_storage(shared: list[Any]) -> torch.UntypedStorage:
    """A storage that another process has shared. Raises RunError when its GPU is not visible here."""
    if len(shared) == 3:
        manager, handle, size = shared
        return torch.UntypedStorage._new_shared_filename_cpu(_raw(manager), _raw(handle), size)
    uuid, handle, size, offset, counter, counter_offset, event, must_wait = shared
    visible = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise RunError(
            f"the trainer's parameters are on GPU {uuid}, and this engine sees {', '.join(visible)}; it must see all "
            "GPUs of its host, or use weight_sync.transport=store"
        )
    return torch.UntypedStorage._new_shared_cuda(
        visible.index(uuid), _raw(handle), size, offset, _raw(counter), counter_offset, _raw(event), must_wait
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text)


def transfer_group(url: str, rank: int, size: int, timeout_s: float) -> Any:
    """A process group beside the default one: NCCL on GPUs, gloo on CPUs. Has `send` and `recv` as torch's backends do.

    The ranks meet at `url`, file:///path or tcp://host:port. All of them must call this within the time limit.
    """
    limit = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous(url, rank, size, timeout=limit))
    store.set_timeout(limit)
    store = dist.distributed_c10d.PrefixStore("weights", store)
    if not has_gpu():
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, rank, size, options)
