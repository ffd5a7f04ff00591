"""Trainer side of the weight transports (`weight_sync.transport`): delivers policy versions to the engines."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.config.lora_transfer import sent_adapters
from megatron_bapo.errors import RunError
from megatron_bapo.model.build import finish_param_gather
from megatron_bapo.model.transfer_member import transfer_member
from megatron_bapo.model.weight_layouts import (
    TRAINER_HOST,
    EngineLayout,
    Placement,
    one_host_per_gpu,
    reader_hosts,
    weight_plan,
)
from megatron_bapo.model.weight_slices import LocalSlices
from megatron_bapo.parallel.collectives import barrier, broadcast_object, gather_by_rank, on_main
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import DeviceStreams, local_device, release_cached_memory, share_storage
from megatron_bapo.trainer.worker import Worker
from megatron_bapo.weight_sync.membership import TransferFailed, offer_plan
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.plan_files import withdraw
from megatron_bapo.weight_sync.ray_store import open_store
from megatron_bapo.weight_sync.route import NUM_ATTEMPTS, TransferGroup
from megatron_bapo.weight_sync.shared_parameters import offer_parameters
from megatron_bapo.weight_sync.slice_stream import send_slices
from megatron_bapo.weight_sync.transport import WeightStore


class Engines(Protocol):
    """The engines as the main rank sees them, for example `controller.rollout_client.RolloutClient`."""

    def load_weights(self, policy_version: int, plan: WeightPlan) -> int:
        """Have every engine load a version; return the bytes that were relayed between hosts when all have loaded it.

        If they have the version already, those that lack it load it.
        """
        ...

    def begin_transfer(self, policy_version: int, plan: str, broken: str) -> TransferGroup:
        """Return the group that will transfer a version to the engines of `load_weights`, which comes next.

        `plan` is the plan's digest. `broken` is the name of the last group if it has failed.
        """
        ...

    def repeat_transfer(self, group: TransferGroup, reason: str) -> TransferGroup:
        """Return the group that repeats the transfer in which `group` has failed."""
        ...


class WeightTransport(Protocol):
    """Delivers policy versions by a plan that is computed once."""

    plan: WeightPlan

    def deliver(self, policy_version: int, engines: Engines | None) -> int:
        """Deliver the parameters to the engines as `policy_version`.

        Collective. `engines` is None on all ranks but the main one, where the bytes are returned that the trainer's
        hosts have sent to other hosts, or to engines' own stores or GPUs. The parameters may change after the call.
        """
        ...


@dataclass(frozen=True)
class TransferSites:
    """Where a trainer rank and others of a weight transfer are."""

    folder: Path
    """Folder of this host's weight store."""
    sender_hosts: Sequence[int]
    """Host of each trainer rank in the weight transfer plan."""
    engine_hosts: Sequence[Sequence[int]]
    """Hosts of each of an engine's nodes over all engines."""
    address: str
    """Address of this host."""
    rendezvous: str
    """`WeightRoute.rendezvous`."""


def weight_transport(worker: Worker, sites: TransferSites) -> WeightTransport:
    """Return the configured transport."""
    match worker.config.weight_sync.transport:
        case "store":
            return WeightPublisher(worker, WeightStore(sites.folder), sites.sender_hosts, sites.engine_hosts)
        case "cuda_ipc":
            return ParameterSharing(worker, sites.folder)
        case "nccl":
            return SliceStreaming(worker, sites)


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

    def deliver(self, policy_version: int, engines: Engines | None) -> int:
        self.publish(policy_version)
        # While engines load, they may request differences to the previous version.
        num_bytes = _load_weights(engines, policy_version, self.plan, self._groups)
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

    def deliver(self, policy_version: int, engines: Engines | None) -> int:
        finish_param_gather([chunk.ddp for chunk in self._model.chunks])
        release_cached_memory()  # also waits for the optimizer step
        rank = self._groups.global_rank
        offer_parameters(self._folder, policy_version, self.plan, rank, self._slices, share_storage)
        barrier(self._groups)
        num_bytes = _load_weights(engines, policy_version, self.plan, self._groups)
        withdraw(self._folder, policy_version, rank)
        return num_bytes


class SliceStreaming:
    """Sends slices from trainer ranks along chains of engine ranks, in a process group of both."""

    def __init__(self, worker: Worker, sites: TransferSites) -> None:
        self._model, self._groups = worker.model, worker.groups
        self._slices = _slices(worker)
        self.plan = _plan(worker, one_host_per_gpu(worker.config))
        rank, limit_s = worker.groups.global_rank, worker.config.rollout.start_timeout_s
        self._member = transfer_member(sites.rendezvous, rank, sites.address, limit_s)
        self._streams = DeviceStreams(local_device())
        self._rendezvous, self._limit_s = sites.rendezvous, limit_s
        self._broken = ""
        """Name of the last group if it has failed."""
        self._has_offered = False

    def deliver(self, policy_version: int, engines: Engines | None) -> int:
        finish_param_gather([chunk.ddp for chunk in self._model.chunks])
        self._offer_plan()
        begin = None
        if engines is not None:
            begin = partial(engines.begin_transfer, policy_version, self.plan.digest, self._broken)
        group = broadcast_object(on_main(begin, self._groups), self._groups)
        executor = ThreadPoolExecutor(1)
        try:
            loading = None if engines is None else executor.submit(engines.load_weights, policy_version, self.plan)
            num_bytes = self._repeated(policy_version, group, engines)
            on_main(None if loading is None else loading.result, self._groups)
            if loading is not None:
                self._member.forget(policy_version)
        finally:
            executor.shutdown(wait=False)
        return num_bytes

    def _offer_plan(self) -> None:
        if self._groups.is_main and not self._has_offered:
            offer_plan(open_store(self._rendezvous, self._limit_s), self.plan)
        self._has_offered = True

    def _repeated(self, policy_version: int, group: TransferGroup, engines: Engines | None) -> int:
        """Transfer a version until all engines have it; return the bytes that all ranks have sent.

        Raises RunError after too many failures.
        """
        num_bytes = 0
        for attempt in range(1, NUM_ATTEMPTS + 1):
            attempts = gather_by_rank(self._attempt(policy_version, group, engines), self._groups)
            num_bytes += sum(each.num_bytes for each in attempts)
            failure = next((each.failure for each in attempts if each.failure is not None), None)
            self._broken = "" if failure is None else group.name
            if failure is None or any(each.committed for each in attempts):
                return num_bytes
            message = f"policy version {policy_version} was not transferred: {failure}"
            if attempt == NUM_ATTEMPTS:
                break
            if engines is not None:
                print(f"{message}; it is transferred again", flush=True)
                group = engines.repeat_transfer(group, failure)
            group = broadcast_object(group, self._groups)
        raise RunError(f"{message}; this was attempt {NUM_ATTEMPTS}")

    def _attempt(self, policy_version: int, group: TransferGroup, engines: Engines | None) -> _Attempt:
        """Send this rank's part in a group; the main rank then commits the version."""
        num_senders, num_bytes = self.plan.num_senders, 0
        if len(group.places) == num_senders:
            return _Attempt(committed=True)  # no engine is left
        try:
            self._member.join(group)
            with self._member.transfer() as chain:
                rank = self._groups.global_rank
                num_bytes = send_slices(self.plan, policy_version, rank, self._slices, chain, self._streams)
            if engines is not None:
                self._member.commit(policy_version, num_senders)
        except TransferFailed as error:
            return _Attempt(num_bytes, failure=str(error))
        return _Attempt(num_bytes, committed=engines is not None)


@dataclass(frozen=True)
class _Attempt:
    """What one rank did in one group."""

    num_bytes: int = 0
    """Bytes that it has sent."""
    failure: str | None = None
    """Why the group has failed."""
    committed: bool = False
    """Whether the rank has committed the version, which all engines then have."""


def _load_weights(engines: Engines | None, policy_version: int, plan: WeightPlan, groups: ParallelGroups) -> int:
    """Return what `Engines.load_weights` does, and 0 on all ranks but the main one, when all engines have loaded."""
    return on_main(None if engines is None else partial(engines.load_weights, policy_version, plan), groups) or 0


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
