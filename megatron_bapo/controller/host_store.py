"""The weight store of the engines' host, where it is not the trainer's: an actor that fills it from the trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_bapo.controller.cluster import ask
from megatron_bapo.logs import redirect_output
from megatron_bapo.model.weight_layouts import ENGINE_HOST, TRAINER_HOST
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.relay import Pulled, pull
from megatron_bapo.weight_sync.transport import Checksums, WeightStore

STORE_SERVER, HOST_STORE = "weight store server", "engines' weight store"


class HostStore:
    """Owns no folder: whoever made it closes it, also when this actor is killed, and another one goes on."""

    def __init__(self, folder: Path, server: Any, full_every: int, timeout_s: float, log_file: Path) -> None:
        redirect_output(log_file)
        self._store = WeightStore(folder)
        self._source = _RemoteStore(server, timeout_s)
        self._full_every = full_every

    def pull(self, version: int) -> Pulled:
        """Bring a version, which the engines then load from the folder."""
        if version in self._store.versions():
            return Pulled(0, 0, 0)  # this actor was killed when it had brought it, and is asked again
        self._store.discard_before(version)  # the newest stays: changes are changes of it
        return pull(self._store, version, ENGINE_HOST, {TRAINER_HOST: self._source}, self._full_every)


class _RemoteStore:
    """A `StoreServer` that is an actor."""

    def __init__(self, server: Any, timeout_s: float) -> None:
        self._server, self._timeout_s = server, timeout_s

    def plan(self, version: int) -> WeightPlan:
        return self._ask(self._server.plan.remote(version))

    def checksums(self, version: int) -> Checksums:
        return self._ask(self._server.checksums.remote(version))

    def message(self, version: int, number: int, base: int | None) -> bytes:
        return self._ask(self._server.message.remote(version, number, base))

    def _ask(self, reference: Any) -> Any:
        return ask(reference, STORE_SERVER, self._timeout_s)
