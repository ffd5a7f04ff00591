"""torchrun on several nodes, with a store that other networks cannot reach and whose contents are never unpickled.

Torch's `c10d` rendezvous keeps a pickle in its store, which every node unpickles, and its store listens on every
interface without asking for a secret: whoever reaches it can run code as the user. The launcher knows all nodes and
their order, so a static rendezvous suffices; it stores only JSON and numbers. Source: torch 2.13,
torch/distributed/elastic/rendezvous/{dynamic_rendezvous,static_tcp_rendezvous}.py.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "megatron-bapo"
_TIMEOUT_S = 600
"""Timeout until all nodes have joined."""


class StaticRendezvous(RendezvousHandler):
    """Rendezvous of nodes with known numbers; the store listens only on the endpoint's address, on node 0."""

    def __init__(self, host: str, port: int, node: int, num_nodes: int, run_id: str) -> None:
        self._address, self._node, self._num_nodes, self._run_id = (host, port), node, num_nodes, run_id
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """Trainer ranks use this store, too."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            self._store = self._open()
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, self._node, self._num_nodes, RendezvousStoreInfo(*self._address))

    def _open(self) -> TCPStore:
        timeout = timedelta(seconds=_TIMEOUT_S)
        if self._node > 0:
            return TCPStore(*self._address, self._num_nodes, is_master=False, timeout=timeout)
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.create_server(self._address, family=family, backlog=4096)
        # The store takes over the listening socket; its own would listen on every interface.
        return TCPStore(
            *self._address, self._num_nodes, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, _, port = parameters.endpoint.rpartition(":")
    node = int(parameters.config["node"])
    return StaticRendezvous(host.strip("[]"), int(port), node, parameters.max_nodes, parameters.run_id)


def main() -> None:
    """Run torchrun with this process's arguments; `--rdzv-backend` names this rendezvous."""
    from torch.distributed import run

    rendezvous_handler_registry.register(BACKEND, _create)
    run.main()


if __name__ == "__main__":
    main()
