"""Notices that a host of a gloo process group is gone, however long the others wait for their turn in a transfer.

gloo limits each wait, but a host may rightly wait for all that is transferred before its turn. And gloo does not tell
who receives or sends a message that its connection has closed meanwhile: `signalException` in its
`transport/tcp/pair.cc` leaves out the operation under way.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import psutil

POLL_S = 1.0
GRACE_S = 5.0
"""Time in which a transfer ends by itself after a connection has closed."""


class HostConnections:
    """The TCP connections that this process opens in a context, such as those of a process group."""

    def __init__(self) -> None:
        self._connections: set[Any] = set()

    @contextmanager
    def opening(self, stall_timeout_s: float) -> Iterator[None]:
        """Take the connections that the context opens. They close when the other system is silent for so long."""
        before = _established()
        yield
        self._connections = _established() - before
        for connection in self._connections:
            _limit_silence(connection, stall_timeout_s)

    @contextmanager
    def needed(self) -> Iterator[None]:
        """End this process if a connection closes and the context does not end soon after."""
        is_over = Event()
        Thread(target=self._watch, args=(is_over,), daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def _watch(self, is_over: Event) -> None:
        while not is_over.wait(POLL_S):
            if not (closed := self._connections - _established()):
                continue
            if not is_over.wait(GRACE_S):
                addresses = ", ".join(sorted({each.raddr.ip for each in closed}))
                print(f"the connection to {addresses} has closed within a message; this process ends", flush=True)
                os._exit(1)


def _established() -> set[Any]:
    """Return this process's open TCP connections."""
    return {each for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED}


def _limit_silence(connection: Any, limit_s: float) -> None:
    """Have the system close a connection when the other one has acknowledged nothing for so long, also if it is idle.

    See TCP_USER_TIMEOUT in tcp(7). gloo sends a message when its receiver is ready, so that a full buffer is no reason
    for silence.
    """
    probe_s = max(1, round(limit_s / 4))
    with socket.socket(fileno=os.dup(connection.fd)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * limit_s))
