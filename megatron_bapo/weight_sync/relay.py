"""Brings versions from the stores of the trainer's hosts to another host's store, in as few bytes as it can.

The engines' side pulls, bucket by bucket, and says which older version it has; where the trainer's side still has that
version, too, only what changed travels. So an engine, or a whole host, that was away gets everything from the store of
the newest version, and no trainer rank takes part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.delta import decode, encode, is_whole
from megatron_bapo.weight_sync.plan import ITEM_BYTES, WeightPlan
from megatron_bapo.weight_sync.transport import Checksums, Filling, WeightStore, in_threads
from megatron_bapo.weight_sync.version_file import VersionReader, raw_bytes


class Source(Protocol):
    """The store of one of the trainer's hosts, as another host sees it."""

    def plan(self, version: int) -> WeightPlan: ...

    def checksums(self, version: int) -> Checksums: ...

    def message(self, version: int, number: int, base: int | None) -> bytes: ...


class StoreServer:
    """Gives buckets of a store, as the differences to an older version where that is smaller."""

    def __init__(self, folder: Path) -> None:
        self._store = WeightStore(folder)

    def plan(self, version: int) -> WeightPlan:
        return self._store.plan(version)

    def checksums(self, version: int) -> Checksums:
        return self._store.manifest(version).checksums

    def message(self, version: int, number: int, base: int | None) -> bytes:
        """A bucket of a version; `base` is the version that the other side has.

        Raises RunError when the version is not, or no longer, committed.
        """
        plan = self._store.plan(version)
        new = bucket_bytes(self._store.open(version), plan, number)
        old = None
        if base is not None and base in self._store.versions() and self._store.plan(base).digest == plan.digest:
            old = bucket_bytes(self._store.open(base), plan, number)
        message = encode(new, old, ITEM_BYTES[plan.dtype])
        self._store.manifest(version)  # gone if its file was overwritten meanwhile
        return message


@dataclass(frozen=True)
class Pulled:
    """What a pull moved."""

    num_bytes: int
    """Of all messages."""
    num_whole: int
    """Buckets that came whole."""
    num_changed: int
    """Buckets that came as differences."""


def pull(store: WeightStore, version: int, host: int, sources: Mapping[int, Source], full_every: int) -> Pulled:
    """Complete and commit a version in the store of `host`; `sources` are those of the trainer's hosts, by number.

    Every `full_every`-th version comes whole. Raises RunError when a bucket does not arrive as it was written.
    """
    plan = next(iter(sources.values())).plan(version)
    base = None if version % full_every == 0 else _base(store, plan, version)
    numbers = [i for i in plan.needed_on(host) if plan.sender_hosts[plan.buckets[i].sender] != host]
    with store.filling(version, plan, host, "pulled") as filling:
        transfer = _Transfer(plan, version, base, None if base is None else store.open(base), sources, filling)
        moved = in_threads(transfer.bring, numbers)
    store.commit(version, plan, host)
    num_whole = sum(is_whole for _, is_whole in moved)
    return Pulled(sum(num_bytes for num_bytes, _ in moved), num_whole, len(moved) - num_whole)


def _base(store: WeightStore, plan: WeightPlan, version: int) -> int | None:
    """The newest version that differences can be applied to."""
    older = [have for have in store.versions() if have < version]
    return older[-1] if older and store.plan(older[-1]).digest == plan.digest else None


class _Transfer:
    """Brings a version's buckets from their senders' stores into the one that is filled."""

    def __init__(
        self,
        plan: WeightPlan,
        version: int,
        base: int | None,
        old: VersionReader | None,
        sources: Mapping[int, Source],
        filling: Filling,
    ) -> None:
        self._plan, self._version, self._base, self._old = plan, version, base, old
        self._sources, self._filling = sources, filling
        self._expected = {host: source.checksums(version) for host, source in sources.items()}

    def bring(self, number: int) -> tuple[int, bool]:
        """The bytes that came, and whether they were the whole bucket."""
        host, num_bytes = self._plan.sender_hosts[self._plan.buckets[number].sender], 0
        for base in dict.fromkeys((self._base, None)):
            message = self._sources[host].message(self._version, number, base)
            num_bytes += len(message)
            new = decode(message, None if base is None else self._old_bytes(number))
            self._filling.write(number, split_bucket(new, self._plan, number))
            if self._filling.checksums[number] == self._expected[host].get(number):
                return num_bytes, is_whole(message)
        raise RunError(
            f"bucket {number} of policy version {self._version} did not arrive from host {host} as it was written; "
            "publish the weights again"
        )

    def _old_bytes(self, number: int) -> memoryview | None:
        """A copy, which the changes may go into."""
        return None if self._old is None else raw_bytes(torch.cat(_flat_parts(self._old, self._plan, number)))


def bucket_bytes(file: VersionReader, plan: WeightPlan, number: int) -> memoryview:
    """The bytes of a bucket's slices, one after the other."""
    parts = _flat_parts(file, plan, number)
    return raw_bytes(parts[0] if len(parts) == 1 else torch.cat(parts))


def _flat_parts(file: VersionReader, plan: WeightPlan, number: int) -> list[torch.Tensor]:
    return [file.slice(part).reshape(-1) for part in plan.buckets[number].slices]


def split_bucket(data: memoryview, plan: WeightPlan, number: int) -> Iterator[torch.Tensor]:
    """The slices of a bucket from its bytes."""
    start, dtype = 0, getattr(torch, plan.dtype)
    flat = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=dtype)
    for part in plan.buckets[number].slices:
        yield flat[start : start + part.box.size].view(part.box.shape)
        start += part.box.size
