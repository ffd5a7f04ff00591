"""Platform layer: the only module that checks whether there is a GPU."""

from __future__ import annotations

import base64
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.profiler import ProfilerActivity, profile

from megatron_bapo.environment_variable import environment_variable
from megatron_bapo.errors import RunError

SNAPSHOT_ENTRIES = 1_000_000
"""Number of the latest allocations and frees in a memory snapshot; each takes about 100 bytes of stack trace."""

NCCL_TIMEOUT_FACTOR = 4
"""A wait for an NCCL operation fails after this many times the limit of a transfer, which is given up before."""
GIVE_UP_TAG = 1
"""Tag of a message that nobody sends."""

SMALLEST_PIECE = 1 << 20
"""Host buffers of at most this many bytes are not split further."""


def has_gpu() -> bool:
    return torch.cuda.is_available()


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first GPU, or None without one."""
    return torch.cuda.get_device_capability(0) if has_gpu() else None


def has_transformer_engine() -> bool:
    """Whether Transformer Engine is installed; the import may still fail."""
    return find_spec("transformer_engine") is not None


def local_device() -> torch.device:
    """Return this rank's device; torchrun's LOCAL_RANK selects the GPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_gpu() else torch.device("cpu")


def claim_device() -> None:
    """Make this rank's GPU the current device; do nothing without a GPU.

    Call this before any other use of a GPU. Otherwise every rank creates a CUDA context on the first GPU of the host.
    """
    if has_gpu():
        torch.cuda.set_device(local_device())


def runs_triton() -> bool:
    """Whether Triton can compile kernels for this process's device; its interpreter is not considered."""
    return has_gpu() and find_spec("triton") is not None


def start_distributed(timeout_s: float, store_file: Path | None = None) -> None:
    """Join the process group that torchrun describes in the environment: NCCL on GPUs, gloo on CPUs.

    With `store_file`, the rendezvous uses a file instead of torchrun's TCP store, which listens on every interface; all
    ranks must then be on this machine.
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


def set_host_threads(*, cpu_offload: bool) -> None:
    """Give an optimizer that is offloaded from a GPU this rank's share of the host's cores.

    The launchers set OMP_NUM_THREADS=1, which is right for everything else; a larger value of the user is kept.
    """
    if has_gpu() and cpu_offload and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))


def now_s() -> float:
    """Return a timestamp in seconds for phase times, after waiting for the device's queued work."""
    synchronize()
    return time.perf_counter()


def synchronize() -> None:
    """Wait for the device's queued work."""
    if has_gpu():
        torch.cuda.synchronize()


def visible_devices() -> list[str]:
    """Return the GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (names.split(",") if names else [str(index) for index in range(1024)])[: torch.cuda.device_count()]


def device_name() -> str | None:
    """Return the driver's name of this rank's GPU, for example NVIDIA H100 80GB HBM3."""
    return torch.cuda.get_device_name(local_device()) if has_gpu() else None


def device_uuid() -> str | None:
    """Return the UUID of this rank's GPU in NVML's format."""
    return f"GPU-{torch.cuda.get_device_properties(local_device()).uuid}" if has_gpu() else None


def num_visible_gpus() -> int:
    return torch.cuda.device_count() if has_gpu() else 0


def free_memory_bytes() -> int:
    """Return the free memory of this rank's GPU, considering all processes; 0 without a GPU."""
    return torch.cuda.mem_get_info(local_device())[0] if has_gpu() else 0


def take_peak_memory() -> tuple[int, int] | None:
    """Return torch's peak bytes (allocated, reserved) on this rank's GPU since the last call; None without a GPU."""
    if not has_gpu():
        return None
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    return peaks


@contextmanager
def memory_snapshot(file: Path) -> Iterator[None]:
    """Record all allocations in the block, with stack traces, for pytorch.org/memory_viz; do nothing without a GPU.

    The file is a pickle that torch writes. This project never reads such files.
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
    """Profile torch operations of the block on the CPU and the GPU, if there is one, and write a Chrome trace.

    The trace is gzipped if the file name ends in .gz. No trace is written if the block fails.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu() else [])]
    with profile(activities=activities) as profiler:
        yield
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(file))


def host_buffers(num_bytes: int) -> list[torch.Tensor]:
    """Allocate uninitialized host memory in pieces, page-locked if there is a GPU.

    Torch allocates page-locked memory in powers of two, so a single piece could use up to twice its size.
    """
    sizes = []
    while (left := num_bytes - sum(sizes)) > 0:
        sizes.append(left if left <= SMALLEST_PIECE else 1 << left.bit_length() - 1)
    return [torch.empty(size, dtype=torch.uint8, pin_memory=has_gpu()) for size in sizes]


def host_buffer(num_bytes: int) -> torch.Tensor:
    """Allocate a buffer of host memory, uint8, page-locked if there is a GPU.

    All of its pages exist when this returns. Unlike `host_buffers`, it is one tensor of exactly this size, because the
    driver locks memory that torch has allocated.
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8).zero_()
    if has_gpu() and num_bytes:
        driver: Any = torch.cuda.cudart()
        code = int(driver.cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
        assert code == 0, f"cudaHostRegister returned {code} for {num_bytes} bytes"
        weakref.finalize(buffer, driver.cudaHostUnregister, buffer.data_ptr())
    return buffer


def host_process_group(timeout_s: float) -> dist.ProcessGroup:
    """Create a gloo group of all ranks, for tensors in host memory. All ranks must call this function."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup), "every rank is in the group"
    return group


def release_cached_memory() -> None:
    """Release freed device memory from torch's cache for other processes, after waiting for queued work."""
    if has_gpu():
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def share_storage(storage: torch.UntypedStorage) -> list[Any]:
    """Return a JSON-compatible handle with which another process on this machine can open the storage.

    A CPU storage is moved to shared memory. Follows torch/multiprocessing/reductions.py. The memory is freed when both
    sides have released it.
    """
    if storage.device.type == "cpu":
        manager, handle, size = storage._share_filename_cpu_()
        return [_text(manager), _text(handle), size]
    index, *fields = storage._share_cuda_()
    fields = [_text(field) if isinstance(field, bytes) else field for field in fields]
    return [str(torch.cuda.get_device_properties(index).uuid), *fields]


def open_storage(shared: list[Any]) -> torch.UntypedStorage:
    """Open a storage that another process has shared. Raises RunError if its GPU is not visible to this process."""
    if len(shared) == 3:
        manager, handle, size = shared
        return torch.UntypedStorage._new_shared_filename_cpu(_raw(manager), _raw(handle), size)
    uuid, handle, size, offset, counter, counter_offset, event, must_wait = shared
    visible = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in visible:
        raise RunError(
            f"the trainer's parameters are on GPU {uuid}, but this engine sees only {', '.join(visible)}; make all "
            "GPUs of the host visible to the engine, or use weight_sync.transport=store"
        )
    return torch.UntypedStorage._new_shared_cuda(
        visible.index(uuid), _raw(handle), size, offset, _raw(counter), counter_offset, _raw(event), must_wait
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text)


def transfer_group(store: Store, rank: int, size: int, address: str, timeout_s: float) -> Any:
    """Create a process group in addition to the default one: a torch backend object, NCCL on GPUs and gloo on CPUs.

    The ranks meet through `store`, and gloo listens on the IP address `address`. All ranks must call this function
    within the timeout, which also limits gloo's waits. Two ranks of NCCL connect when they first need each other.
    """
    if not has_gpu():
        return host_group(store, rank, size, address, timeout_s)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=NCCL_TIMEOUT_FACTOR * timeout_s)
    # By default the group's watchdog thread ends the whole process a minute after a rank is lost. With this variable,
    # which the constructor reads, waits raise the error (blockingWait_ in torch's ProcessGroupNCCL.cpp).
    with environment_variable("TORCH_NCCL_BLOCKING_WAIT", "1"):
        return dist.ProcessGroupNCCL(store, rank, size, options)


def give_up(group: Any) -> None:
    """End all operations of a transfer group, in any thread, with an error; other ranks see closed connections."""
    if has_gpu():
        group.abort()
        return
    # gloo's own abort leaves receive and send waiting. It closes all connections when one wait expires.
    other = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.zeros(1)], other, GIVE_UP_TAG).wait(timedelta(milliseconds=1))


class DeviceStreams:
    """The queues of one device's work; on a CPU work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Queue this thread's work on a stream of its own within the context."""
        if self.device.type == "cpu":
            yield
            return
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield

    def finish(self) -> None:
        """Wait until the device has done what this thread has queued."""
        if self.device.type != "cpu":
            torch.cuda.current_stream(self.device).synchronize()


def host_group(store: Store, rank: int, size: int, address: str, timeout_s: float) -> Any:
    """Create a gloo process group of hosts that meet through `store`; this host listens on its IP address `address`.

    All hosts must call this function within the timeout, which also limits every later wait for another host.
    """
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, size, options)
