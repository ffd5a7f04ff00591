"""The weight store of an engines' host, where it is not the trainer's: an actor that fills it from the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.cluster import ask, place
from megatron_bapo.controller.run_state import RunDirectory
from megatron_bapo.logs import redirect_output
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.relay import Pulled, StoreServer, pull
from megatron_bapo.weight_sync.transport import Checksums, WeightStore


@dataclass(frozen=True)
class StoreHome:
    """Where a host's weight store is."""

    folder: Path
    node_id: str | None = None
    """None on the machine of a run that has only one."""


def server_name(host: int) -> str:
    return f"weight store server of host {host}"


def host_store_name(host: int) -> str:
    return f"engines' weight store of host {host}"


def place_relays(config: Config, directory: RunDirectory, stores: Mapping[int, StoreHome], num_senders: int) -> list:
    """Start, without waiting, what fills the engines' stores from the trainer's: the handles.

    `stores` are by number of the host; the first `num_senders` are the trainer's. None are started for these alone.
    """
    receivers = {host: store for host, store in stores.items() if host >= num_senders}
    if not receivers:
        return []
    servers = {
        host: place(
            StoreServer, stores[host].folder, name=server_name(host), node_id=stores[host].node_id, stateless=True
        )
        for host in range(num_senders)
    }
    filled = [
        place(
            HostStore,
            store.folder,
            host,
            servers,
            name=host_store_name(host),
            node_id=store.node_id,
            stateless=True,
            full_every=config.weight_sync.full_every,
            timeout_s=config.rollout.start_timeout_s,
            log_file=directory.logs / f"weight-store-{host}.log",
        )
        for host, store in receivers.items()
    ]
    return [*servers.values(), *filled]


class HostStore:
    """Owns no folder: whoever made it closes it, also when this actor is killed, and another one goes on."""

    def __init__(
        self,
        folder: Path,
        host: int,
        servers: Mapping[int, Any],
        *,
        full_every: int,
        timeout_s: float,
        log_file: Path,
    ) -> None:
        """`servers` are those of the trainer's hosts, by number, as is `host`."""
        redirect_output(log_file)
        self._store, self._host, self._full_every = WeightStore(folder), host, full_every
        self._sources = {number: _RemoteStore(server, number, timeout_s) for number, server in servers.items()}

    def pull(self, version: int) -> Pulled:
        """Bring a version, which the engines then load from the folder."""
        if version in self._store.versions():
            return Pulled(0, 0, 0)  # this actor was killed when it had brought it, and is asked again
        self._store.discard_before(version)  # the newest stays: changes are changes of it
        return pull(self._store, version, self._host, self._sources, self._full_every)


class _RemoteStore:
    """A `StoreServer` that is an actor."""

    def __init__(self, server: Any, host: int, timeout_s: float) -> None:
        self._server, self._host, self._timeout_s = server, host, timeout_s

    def plan(self, version: int) -> WeightPlan:
        return self._ask(self._server.plan.remote(version))

    def checksums(self, version: int) -> Checksums:
        return self._ask(self._server.checksums.remote(version))

    def message(self, version: int, number: int, base: int | None) -> bytes:
        return self._ask(self._server.message.remote(version, number, base))

    def _ask(self, reference: Any) -> Any:
        return ask(reference, server_name(self._host), self._timeout_s)
