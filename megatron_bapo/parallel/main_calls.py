"""Calls of the main rank for which all others wait: in the store where the ranks have met, not in a collective.

So the timeout of collectives does not limit them, and no kernel of NCCL occupies the GPUs, which may be the engines',
too. While a call lasts, the main rank shows signs of life there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megatron_bapo.errors import RunError

NUM_SIGNS = 4
"""Signs of life in the time after which the others give up."""
T = TypeVar("T")


class MainCalls:
    """Numbers these calls, in the same order on all ranks."""

    def __init__(self, limit_s: float = 1800.0) -> None:
        """`limit_s` is how long the main rank may show no sign of life."""
        self._limit_s = limit_s
        self._num = 0

    def make(self, call: Callable[[], T]) -> T:
        """Return the result of a call, and let the other ranks know that it has returned; on the main rank."""
        if dist.get_world_size() == 1:
            return call()
        store, key = self._next()
        with self._signs_of_life(store, key):
            result = call()
        store.set(key, "")
        return result

    def wait(self) -> None:
        """Wait until the main rank's call has returned; on any other rank.

        Raises RunError if the main rank shows no sign of life, and RuntimeError if its process has ended.
        """
        (store, key), signs = self._next(), -1
        while True:
            try:
                return store.wait([key], timedelta(seconds=self._limit_s))
            except RuntimeError:  # a timeout, or a lost connection, with which the next line fails, too
                before, signs = signs, store.add(_signs(key), 0)
            if signs == before:
                raise RunError(
                    f"rank 0 has shown no sign of life for trainer.collective_timeout_s={self._limit_s:g} while all "
                    "ranks waited for it; see its log, and whether its process is stopped or its host is overloaded"
                )

    def _next(self) -> tuple[Store, str]:
        self._num += 1
        return dist.distributed_c10d._get_default_store(), f"call {self._num} of the main rank"

    @contextmanager
    def _signs_of_life(self, store: Store, key: str) -> Iterator[None]:
        has_returned = threading.Event()

        def show() -> None:
            with suppress(RuntimeError):  # the store has ended, and torchrun will end this process
                while not has_returned.wait(self._limit_s / NUM_SIGNS):
                    store.add(_signs(key), 1)

        thread = threading.Thread(target=show, name="signs of life", daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_returned.set()
            thread.join()


def _signs(key: str) -> str:
    return f"{key}: signs of life"
