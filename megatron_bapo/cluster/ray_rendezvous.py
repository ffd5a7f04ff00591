"""A rendezvous for process groups in Ray's key-value store, which only holders of the cluster's token can access.

torch's TCPStore, in contrast, answers everybody on the network.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from ray.experimental import internal_kv
from torch._C._distributed_c10d import Store

_NAMESPACE = b"megatron-bapo-rendezvous"
_POLL_S = 0.01


class RayRendezvous(Store):
    """The keys of one process group; torch's backend calls these methods when it creates the group."""

    def __init__(self, name: str, timeout_s: float) -> None:
        """`name` is unique to the group. The process must be connected to Ray."""
        super().__init__()
        self._name, self._timeout_s = name, timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        internal_kv._internal_kv_put(self._key(key), value, namespace=_NAMESPACE)

    def get(self, key: str) -> bytes:
        """Return a value as soon as it is set. Raises TimeoutError after the timeout."""
        deadline = time.monotonic() + self._timeout_s
        while (value := internal_kv._internal_kv_get(self._key(key), namespace=_NAMESPACE)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"another process did not join the group {self._name} within {self._timeout_s:.0f} s"
                )
            time.sleep(_POLL_S)
        return value

    def wait(self, keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(internal_kv._internal_kv_exists(self._key(key), namespace=_NAMESPACE) for key in keys)

    def remove_keys(self) -> None:
        """Remove all keys of the group, which are not needed once all its processes have joined."""
        internal_kv._internal_kv_del(self._key(""), del_by_prefix=True, namespace=_NAMESPACE)

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"
