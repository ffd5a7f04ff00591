"""Count the bytes of live tensors, real or fake, as PyTorch's operators create and drop them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """While entered, tracks every storage that an operator returns and that was not among its arguments.

    Earlier storages, such as parameters, and workspaces inside operators do not count. Under `FakeTensorMode`, which
    must be entered first, the bytes are those of the real tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.largest = 0
        """Bytes of the largest single storage."""
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if id(storage) not in given and id(storage) not in self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known.add(id(storage))
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._drop, id(storage), size).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


def count_live_bytes(task: Callable[[], object]) -> LiveBytes:
    """Run the task, drop its result and return the counter."""
    with LiveBytes() as counter:
        task()
    return counter
