"""Weight stores of engine hosts without a trainer: actors on all hosts fill them from the trainer's stores."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from megatron_bapo.cluster.host_connections import HostConnections
from megatron_bapo.cluster.ray_cluster import create_actor, head_address, own_address
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import RunError
from megatron_bapo.logs import redirect_output
from megatron_bapo.parallel.platform import host_group
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.weight_sync.host_chain import Chain, receive, send
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.ray_store import RayStore
from megatron_bapo.weight_sync.transport import WeightStore


@dataclass(frozen=True)
class StorePlacement:
    """Location of a host's weight store."""

    folder: Path
    node_id: str | None = None
    """Ray node of the host; None for a run on a single machine."""


def host_store_name(host: int) -> str:
    return f"weight store of host {host}"


def create_host_stores(
    config: Config, directory: RunDirectory, stores: Mapping[int, StorePlacement], num_senders: int
) -> list[Any]:
    """Create the actors that transfer versions between the hosts' stores, without waiting for them.

    Returns their handles. `stores` are by host number; the first `num_senders` are the trainer's. If there are no other
    stores, no actor is created.
    """
    if len(stores) == num_senders:
        return []
    return [
        create_actor(
            HostStore,
            store.folder,
            host,
            name=host_store_name(host),
            node_id=store.node_id,
            stateless=True,
            limit_s=config.rollout.start_timeout_s,
            stall_timeout_s=config.weight_sync.stall_timeout_s,
            log_file=directory.logs / f"weight-store-{host}.log",
        )
        for host, store in stores.items()
    ]


class HostStore:
    """Takes part in transfers between hosts for one host's weight store.

    It does not own the store's folder, so that a restarted actor continues with the same folder. Ray repeats a call
    whose reply was lost in the network; the second call then returns what the first one did.
    """

    def __init__(self, folder: Path, host: int, *, limit_s: float, stall_timeout_s: float, log_file: Path) -> None:
        """`host` is this host's number; `limit_s` limits a transfer and `stall_timeout_s` another host's silence."""
        redirect_output(log_file)
        self._store, self._host = WeightStore(folder), host
        self._limit_s, self._stall_timeout_s = limit_s, stall_timeout_s
        self._name, self._group, self._connections = "", None, HostConnections()
        self._plan: WeightPlan | None = None
        self._ranks: dict[int, int] = {}
        self._finished: tuple[int, int | None] | None = None
        """The last version that was transferred in this group, and the call's result."""
        self._background = ThreadPoolExecutor(1)
        self._preparation: Future[None] | None = None

    def join(self, name: str, hosts: tuple[int, ...], plan: WeightPlan) -> None:
        """Create the process group `name` together with the other hosts; its transfers follow the plan."""
        if self._group is not None and self._name == name:
            return
        self._name, self._group, self._plan, self._finished = name, None, plan, None
        self._ranks = {host: rank for rank, host in enumerate(hosts)}
        # The store has a name here, because a PrefixStore keeps no store of Python.
        store = RayStore(head_address(), self._stall_timeout_s)
        rendezvous, rank = PrefixStore(name, store), self._ranks[self._host]
        with self._connections.opening(self._stall_timeout_s):
            self._group = host_group(rendezvous, rank, len(hosts), own_address(), self._limit_s)

    def versions(self, digest: str) -> list[int]:
        """Return the committed versions that were written under the plan with this digest, oldest first."""
        return [version for version in self._store.versions() if self._store.manifest(version).plan == digest]

    def send(self, version: int, receivers: tuple[int, ...], base: int | None) -> int:
        """Send this host's buckets and return the number of bytes.

        `base` is the older version that all hosts have, or None to send them whole.
        """
        sent = self._once(version, receivers, lambda chain, _: send(self._store, version, self._host, chain, base))
        assert sent is not None
        return sent

    def receive(self, version: int, receivers: tuple[int, ...], base: int | None) -> None:
        """Receive and commit a version, so that this host's engines can load it."""
        if self._preparation is not None and (error := self._preparation.exception()) is not None:  # waits for it
            print(f"no file is prepared for policy version {version}: {error!r}", flush=True)
        self._preparation = None
        self._store.discard_before(version)  # keeps the newest version, which differences refer to
        self._once(version, receivers, lambda chain, plan: receive(self._store, version, plan, self._host, chain, base))

    def prepare(self, version: int) -> None:
        """Begin to prepare for differences to this version, which all engines of this host have loaded."""
        self._store.discard_before(version)
        self._preparation = self._background.submit(self._store.prepare, version)

    def _once(
        self, version: int, receivers: tuple[int, ...], transfer: Callable[[Chain, WeightPlan], int | None]
    ) -> int | None:
        if self._group is None or self._plan is None:
            raise RunError(f"{host_store_name(self._host)} has restarted and is in no process group")
        if self._finished is not None and self._finished[0] == version:
            return self._finished[1]
        try:
            with self._connections.needed():
                self._finished = version, transfer(Chain(self._group, self._ranks, receivers), self._plan)
            return self._finished[1]
        except RunError as error:
            message = str(error)
        # The other hosts wait until the group's connections are closed, which its last reference does.
        self._group = None
        gc.collect()
        raise RunError(f"{host_store_name(self._host)}: {message}")
