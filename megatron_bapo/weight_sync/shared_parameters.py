"""Zero-copy weight transfer on one host: engines read the trainer's parameters in place, without staging.

For each version, every trainer rank announces how to open its storages and where in them the slices lie that the plan
assigns to it. In these plans every GPU is a separate host, so an engine rank reads from its own GPU whatever the
trainer rank there has, and the rest from other GPUs.

Parameters must not change from the announcement until the last engine has finished reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.plan import Slice, WeightPlan
from megatron_bapo.weight_sync.plan_files import announce, announced, announced_plan
from megatron_bapo.weight_sync.route import TransferGroup
from megatron_bapo.weight_sync.whole_tensors import fingerprint, whole_tensors

Share = Callable[[torch.UntypedStorage], list[Any]]
Open = Callable[[list[Any]], torch.UntypedStorage]


def offer_parameters(
    folder: Path, version: int, plan: WeightPlan, rank: int, read: Callable[[Slice], torch.Tensor], share: Share
) -> int:
    """Announce the slices of a rank and return their number of bytes; `read` returns views of parameters."""
    storages: dict[int, int] = {}
    shared: list[list[Any]] = []
    slices: dict[int, list[Any]] = {}
    fingerprints: dict[int, list[list[int]]] = {}
    for number in plan.sent_by(rank):
        views = [read(part) for part in plan.buckets[number].slices]
        for view in views:
            storage = view.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = len(shared)
                shared.append(share(storage))
        slices[number] = [
            [storages[view.untyped_storage()._cdata], view.storage_offset(), list(view.stride())] for view in views
        ]
        fingerprints[number] = torch.stack([fingerprint(view) for view in views]).tolist()
    announce(folder, version, rank, plan, storages=shared, slices=slices, fingerprints=fingerprints)
    return plan.num_bytes(plan.sent_by(rank))


class SharedParameters:
    """Reads the parameters that trainer ranks announce, for the engine rank on GPU number `place` of the plan.

    `device` is the torch device of that GPU in this process.
    """

    def __init__(self, folder: Path, place: int, open_storage: Open, device: torch.device) -> None:
        self._folder, self._place, self._open, self._device = folder, place, open_storage, device

    def plan(self, version: int) -> WeightPlan:
        return announced_plan(self._folder, version)

    def verify(self, version: int, _group: TransferGroup | None = None) -> int:
        """Compare fingerprints and return the number of bytes. Raises RunError if a fingerprint differs."""
        plan = self.plan(version)
        for number, part, view, expected in self._slices(version, plan):
            found = fingerprint(view).tolist()
            if found != expected:
                raise RunError(
                    f"{part.name} of policy version {version}, read from trainer rank {plan.buckets[number].sender}, "
                    f"differs from that rank's parameter: expected checksum {expected}, found {found}"
                )
        return plan.num_bytes(plan.needed_on(self._place))

    def read(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the tensors of which this engine rank needs a part; only that part is initialized."""
        plan = self.plan(version)
        slices = ((part, view) for _, part, view, _ in self._slices(version, plan))
        yield from whole_tensors(plan, plan.needed_on(self._place), slices, self._device)

    def finish(self, version: int) -> None:
        """Do nothing: the trainer waits for all engines before it changes its parameters."""

    def _slices(self, version: int, plan: WeightPlan) -> Iterator[tuple[int, Slice, torch.Tensor, list[int]]]:
        offers: dict[int, dict[str, Any]] = {}
        opened: dict[tuple[int, int], torch.Tensor] = {}
        dtype = getattr(torch, plan.dtype)
        for number in plan.needed_on(self._place):
            bucket = plan.buckets[number]
            if bucket.sender not in offers:
                offers[bucket.sender] = announced(self._folder, version, bucket.sender)
            offer = offers[bucket.sender]
            for part, (index, offset, strides), expected in zip(
                bucket.slices, offer["slices"][str(number)], offer["fingerprints"][str(number)], strict=True
            ):
                key = bucket.sender, index
                if key not in opened:
                    storage = self._open(offer["storages"][index])
                    opened[key] = torch.empty(0, dtype=dtype, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
                yield number, part, opened[key].as_strided(part.box.shape, strides, offset), expected
