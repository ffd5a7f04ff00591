"""A rendezvous for process groups in Ray's key-value store, which only holders of the cluster's token can access.

torch's TCPStore, in contrast, answers everybody on the network. This is the only file outside the rollout plane that
knows Ray: ranks inside vLLM and trainer ranks need the store, but are no workers of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import FileStore, Store

from megatron_bapo.weight_sync.route import RENDEZVOUS_NAMESPACE

_POLL_S = 0.01
_CALL_S = 60.0
"""Timeout of one call of Ray's key-value store, which repeats it while Ray's head cannot be reached."""


class RayStore(Store):
    """Ray's key-value store; torch's backends call these methods when they create a group."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`address` is HOST:PORT of Ray's head. Ray reads the cluster's token from the process's environment."""
        super().__init__()
        from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
        from ray.exceptions import RayError

        self._client: Any = GcsClient(address=address)
        self._timeout_s, self._errors = timeout_s, RayError

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._call("internal_kv_put", key.encode(), data, True)

    def get(self, key: str) -> bytes:
        """Return a value as soon as it is set. Raises TimeoutError after the timeout, as if Ray's head is silent."""
        deadline = time.monotonic() + self._timeout_s
        while (value := self._call("internal_kv_get", key.encode())) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process did not set {key} within {self._timeout_s:.0f} s")
            time.sleep(_POLL_S)
        return value

    def wait(self, keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        encoded = [key.encode() for key in keys]
        return len(self._call("internal_kv_multi_get", encoded)) == len(encoded)

    def delete_key(self, key: str) -> bool:
        return bool(self._call("internal_kv_del", key.encode(), False))

    def delete_all(self, prefix: str) -> None:
        """Remove all keys with a prefix."""
        self._call("internal_kv_del", prefix.encode(), True)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call the key-value store. Raises TimeoutError if it does not answer: Ray's own error is no RuntimeError."""
        try:
            return getattr(self._client, method)(*arguments, RENDEZVOUS_NAMESPACE, timeout=_CALL_S)
        except self._errors as error:
            raise TimeoutError(f"Ray's head did not answer within {_CALL_S:.0f} s: {error}") from error


def open_store(url: str, timeout_s: float) -> Store:
    """Open the store of a `WeightRoute.rendezvous`: ray://HOST:PORT, or file:///path for processes on one machine."""
    parts = urlsplit(url)
    match parts.scheme:
        case "ray":
            return RayStore(parts.netloc, timeout_s)
        case "file":
            store = FileStore(parts.path, -1)
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
        case scheme:
            raise ValueError(f"the rendezvous {url} has the scheme {scheme!r}; use ray://HOST:PORT or file:///path")
