"""Sources from which an engine rank reads new weights, one for each `weight_sync.transport`.

`verify` runs while the old weights are still served. `read` then yields whole tensors, in which only this rank's parts
need to hold data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.lora import LoraConfig
from megatron_bapo.errors import RunError
from megatron_bapo.model.hf_import import SafetensorsFolder, check_tensors
from megatron_bapo.model.hf_mapping import expected_shapes, frozen_tensors, trained_shapes
from megatron_bapo.model.lora_mapping import adapter_table
from megatron_bapo.model.transfer_member import transfer_member
from megatron_bapo.model.weight_layouts import EngineLayout
from megatron_bapo.parallel.platform import DeviceStreams, open_storage
from megatron_bapo.weight_sync.membership import Membership, TransferFailed, fetch_plan
from megatron_bapo.weight_sync.plan import Slice, WeightPlan
from megatron_bapo.weight_sync.plan_files import announced_plan
from megatron_bapo.weight_sync.route import TransferGroup, WeightRoute
from megatron_bapo.weight_sync.shared_parameters import SharedParameters
from megatron_bapo.weight_sync.slice_stream import receive_slices
from megatron_bapo.weight_sync.transport import WeightStore
from megatron_bapo.weight_sync.whole_tensors import whole_tensors


class WeightSource(Protocol):
    def verify(self, version: int, group: TransferGroup | None = None, /) -> int:
        """Check a version as far as possible before it is loaded; return the bytes that this rank will read.

        `group` is the one that transfers the version, for transports that need one.
        """
        ...

    def read(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and tensors of a version."""
        ...

    def finish(self, version: int) -> None:
        """Called after all tensors were loaded. Raises RunError if the version was overwritten meanwhile."""
        ...


def weight_source(route: WeightRoute, layout: EngineLayout, rank: int, device: torch.device) -> WeightSource:
    """Return the weight source of rank `rank` of an engine whose model is on `device`."""
    place = route.first_place + rank
    match route.transport:
        case "store":
            return _FromStore(WeightStore(route.folder), layout, rank)
        case "cuda_ipc":
            return SharedParameters(route.folder, place, open_storage, device)
        case "nccl":
            return _FromGroup(route, place, device)


def plan_of(route: WeightRoute, version: int, group: TransferGroup | None = None) -> WeightPlan:
    """Return the transfer plan of a version. Raises RunError if there is no such version."""
    match route.transport:
        case "store":
            return WeightStore(route.folder).plan(version)
        case "cuda_ipc":
            return announced_plan(route.folder, version)
        case "nccl":
            if group is None:
                raise RunError(f"policy version {version} was not offered: no group transfers it")
            return fetch_plan(route.rendezvous, group.plan, route.timeout_s)


def version_shapes(model_path: Path, adapters: LoraConfig | None) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that every policy version has.

    They are those of the adapters, or without any those of the checkpoint that training changes. Raises UserError if
    the checkpoint's files are not those of its config.json.
    """
    architecture = read_architecture(model_path)
    if adapters is not None:
        return expected_shapes(architecture, adapter_table(adapters))
    with SafetensorsFolder(model_path) as folder:
        check_tensors(folder.shapes(), architecture, model_path)
    return trained_shapes(architecture)


def read_frozen_tensors(model_path: Path) -> dict[str, torch.Tensor]:
    """Return the checkpoint's tensors that training leaves as they are, which no version has."""
    if not (frozen := frozen_tensors(read_architecture(model_path))):
        return {}
    with SafetensorsFolder(model_path) as folder:
        return {name: folder.slice(name)[:] for name in frozen}


def check_complete(
    route: WeightRoute, version: int, group: TransferGroup | None, expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Check that a version has exactly the expected tensors: vLLM only warns about missing ones, and keeps the old.

    Raises RunError if not.
    """
    found = plan_of(route, version, group).shapes
    for name in sorted(found.keys() ^ expected.keys()):
        raise RunError(f"policy version {version} {'has unknown' if name in found else 'lacks'} tensor {name}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise RunError(f"policy version {version} has {name} as {found[name]}, the model as {shape}")


class _FromStore:
    """Reads the weight store of this host."""

    def __init__(self, store: WeightStore, layout: EngineLayout, rank: int) -> None:
        self._store, self._layout, self._rank = store, layout, rank

    def verify(self, version: int, _group: TransferGroup | None = None) -> int:
        return self._store.verify(version, self._reader(version))

    def read(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield memory-mapped tensors, so that only the parts that vLLM's loaders use are read."""
        yield from self._store.read(version, self._reader(version))

    def finish(self, version: int) -> None:
        self._store.manifest(version)

    def _reader(self, version: int) -> int | None:
        """Return this rank's number in the plan, or None for all parts if the plan is for another layout."""
        return self._rank if self._store.plan(version).reader_layout == self._layout.name else None


class _FromGroup:
    """Receives slices as a member of a transfer group and checks them on arrival."""

    def __init__(self, route: WeightRoute, place: int, device: torch.device) -> None:
        self._route, self._place, self._streams = route, place, DeviceStreams(device)

    @cached_property
    def _member(self) -> Membership:
        return transfer_member(self._route.rendezvous, self._place, self._route.address, self._route.timeout_s)

    def verify(self, version: int, group: TransferGroup | None = None) -> int:
        """Join the group; the old weights are still served if it does not form."""
        assert group is not None, f"version {version} needs a transfer group"
        self._plan = fetch_plan(self._route.rendezvous, group.plan, self._route.timeout_s)
        try:
            self._member.join(group)
        except TransferFailed:
            self._join_next()
        return self._plan.num_bytes(self._plan.needed_on(self._place))

    def read(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        numbers = self._plan.needed_on(self._place)
        yield from whole_tensors(self._plan, numbers, self._slices(version), self._streams.device)

    def _slices(self, version: int) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Yield the slices of a version until all ranks have theirs, in a further group if one fails."""
        loaded = set[int]()
        while True:
            try:
                with self._member.transfer() as chain:
                    yield from receive_slices(self._plan, version, self._place, chain, self._streams, loaded)
                    self._member.received(version)
            except TransferFailed:
                self._join_next()
            else:
                return

    def _join_next(self) -> None:
        """Join the next group that forms. Raises RunError if the trainer forms no further one."""
        while True:
            with suppress(TransferFailed):
                self._member.join(self._member.next_group())
                return

    def finish(self, version: int) -> None:
        """Return at once: received tensors are not overwritten."""
