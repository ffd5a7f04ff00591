"""Trainer side of the weight transports (`weight_sync.transport`): delivers policy versions to the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.lora_transfer import sent_adapters
from megatron_bapo.model.build import finish_param_gather
from megatron_bapo.model.weight_layouts import (
    TRAINER_HOST,
    EngineLayout,
    Placement,
    engine_route,
    one_host_per_gpu,
    reader_hosts,
    weight_plan,
)
from megatron_bapo.model.weight_slices import LocalSlices
from megatron_bapo.parallel.collectives import barrier
from megatron_bapo.parallel.platform import local_device, release_cached_memory, share_storage, transfer_group
from megatron_bapo.trainer.worker import Worker
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.plan_files import announce, withdraw
from megatron_bapo.weight_sync.shared_parameters import offer_parameters
from megatron_bapo.weight_sync.slice_stream import send_slices
from megatron_bapo.weight_sync.transport import WeightStore

Load = Callable[[], int]
"""Makes every engine load the version; returns the number of bytes when all have loaded it."""


class WeightTransport(Protocol):
    """Delivers policy versions by a plan that is computed once."""

    plan: WeightPlan

    def deliver(self, policy_version: int, load: Load | None) -> int:
        """Deliver the parameters to every engine as `policy_version` and return what `load` returns.

        Collective. `load` is None on all ranks but the main one, and these ranks return 0. The parameters may change
        after the call.
        """
        ...


def weight_transport(
    worker: Worker, folder: Path, sender_hosts: Sequence[int], engine_hosts: Sequence[Sequence[int]]
) -> WeightTransport:
    """Return the configured transport; `folder` is the folder of this host's weight store.

    `sender_hosts` is the host of each trainer rank, and `engine_hosts` are the hosts of each of an engine's nodes over
    all engines.
    """
    match worker.config.weight_sync.transport:
        case "store":
            return WeightPublisher(worker, WeightStore(folder), sender_hosts, engine_hosts)
        case "cuda_ipc":
            return ParameterSharing(worker, folder)
        case "nccl":
            return SliceStreaming(worker, folder)


class WeightPublisher:
    """Delivers weights through the weight store of this rank's host."""

    def __init__(
        self,
        worker: Worker,
        store: WeightStore,
        sender_hosts: Sequence[int] | None = None,
        engine_hosts: Sequence[Sequence[int]] = ((TRAINER_HOST,),),
    ) -> None:
        """Prepare the plan; without `sender_hosts` all trainer ranks are on one host."""
        self.store = store
        self._model, self._groups = worker.model, worker.groups
        self._slices = _slices(worker)
        senders = tuple(sender_hosts or [TRAINER_HOST] * worker.config.parallel.world_size)
        self.plan = _plan(worker, Placement(senders, reader_hosts(worker.config.rollout, engine_hosts)))
        self._host = senders[worker.groups.global_rank]
        self._is_first_on_host = senders.index(self._host) == worker.groups.global_rank

    def deliver(self, policy_version: int, load: Load | None) -> int:
        self.publish(policy_version)
        num_bytes = 0 if load is None else load()
        barrier(self._groups)  # until here engines may request differences to the previous version
        if self._is_first_on_host:
            self.store.discard_before(policy_version)
        return num_bytes

    def publish(self, policy_version: int) -> int:
        """Write a version to the stores of the trainer's hosts and return the number of bytes that this rank wrote.

        Every rank writes its own slices, without a gather; then the first rank of each host commits the version.
        """
        finish_param_gather([chunk.ddp for chunk in self._model.chunks])
        num_bytes = self.store.write(policy_version, self.plan, self._groups.global_rank, self._slices)
        barrier(self._groups)
        if self._is_first_on_host:
            self.store.commit(policy_version, self.plan, self._host)
        barrier(self._groups)  # a rank that started the next version early would treat this one as abandoned
        return num_bytes


class ParameterSharing:
    """Shares parameter memory with engines on the same GPUs (CUDA IPC)."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        self._model, self._groups, self._folder = worker.model, worker.groups, folder
        self._slices = _slices(worker)
        self.plan = _plan(worker, one_host_per_gpu(worker.config))

    def deliver(self, policy_version: int, load: Load | None) -> int:
        finish_param_gather([chunk.ddp for chunk in self._model.chunks])
        release_cached_memory()  # also waits for the optimizer step
        rank = self._groups.global_rank
        offer_parameters(self._folder, policy_version, self.plan, rank, self._slices, share_storage)
        barrier(self._groups)
        num_bytes = 0 if load is None else load()
        barrier(self._groups)
        withdraw(self._folder, policy_version, rank)
        return num_bytes


class SliceStreaming:
    """Sends slices from trainer ranks to engine ranks over a process group that both join at the first version."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        self._model, self._groups, self._folder = worker.model, worker.groups, folder
        self._slices = _slices(worker)
        self._route = engine_route(worker.config, folder, 0)
        self.plan = _plan(worker, one_host_per_gpu(worker.config))

    @cached_property
    def _group(self) -> Any:
        route = self._route
        return transfer_group(route.rendezvous, self._groups.global_rank, route.num_places, route.timeout_s)

    def deliver(self, policy_version: int, load: Load | None) -> int:
        finish_param_gather([chunk.ddp for chunk in self._model.chunks])
        rank = self._groups.global_rank
        announce(self._folder, policy_version, rank, self.plan)
        barrier(self._groups)
        executor = ThreadPoolExecutor(1)
        try:
            loading = None if load is None else executor.submit(load)
            send_slices(self.plan, rank, self._slices, self._group, local_device())
            num_bytes = 0 if loading is None else loading.result()
        finally:
            executor.shutdown(wait=False)  # an engine that waits for a dead sender must not block this rank
        barrier(self._groups)
        withdraw(self._folder, policy_version, rank)
        return num_bytes


def _sent_adapters(worker: Worker) -> LoraConfig | None:
    return sent_adapters(worker.config, worker.model.architecture)


def _slices(worker: Worker) -> LocalSlices:
    """Return what this rank has of a policy version."""
    model = worker.model
    if _sent_adapters(worker) is None:
        return LocalSlices(model, worker.groups)
    assert model.adapters is not None, "a policy with model.lora has adapters"
    return LocalSlices(model.adapters, worker.groups)


def _plan(worker: Worker, placement: Placement) -> WeightPlan:
    config = worker.config
    return weight_plan(
        worker.model.architecture,
        config.parallel,
        EngineLayout.of(config.rollout),
        placement,
        dtype=config.model.dtype,
        bucket_bytes=config.weight_sync.bucket_mib << 20,
        lora=_sent_adapters(worker),
    )
