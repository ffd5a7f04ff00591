"""The weight store of an engines' host, where it is not the trainer's: an actor that fills it from the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.cluster import ask, place
from megatron_bapo.controller.run_state import RunDirectory
from megatron_bapo.logs import redirect_output
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.relay import Pulled, pull
from megatron_bapo.weight_sync.transport import Checksums, WeightStore


def server_name(host: int) -> str:
    return f"weight store server of host {host}"


def host_store_name(host: int) -> str:
    return f"engines' weight store of host {host}"


def place_host_store(
    config: Config,
    directory: RunDirectory,
    host: int,
    folder: Path,
    servers: Mapping[int, Any],
    node_id: str | None = None,
) -> Any:
    """Start a `HostStore` without waiting for it: its handle."""
    return place(
        HostStore,
        folder,
        host,
        servers,
        name=host_store_name(host),
        node_id=node_id,
        stateless=True,
        full_every=config.weight_sync.full_every,
        timeout_s=config.rollout.start_timeout_s,
        log_file=directory.logs / f"weight-store-{host}.log",
    )


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
