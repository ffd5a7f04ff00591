"""A copy of a rank's optimizer states in host memory, for a thread that reads it while training continues."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.parallel.platform import host_buffer, synchronize
from megatron_bapo.trainer.optimizer import STATES, Optimizer, State

_ALIGNMENT = 64
"""Bytes at whose multiples the copies start."""


class Snapshot:
    """This rank's pieces of the fp32 parameters and Adam's moments at one instant, in memory that is allocated once."""

    def __init__(self, optimizer: Optimizer, groups: ParallelGroups) -> None:
        """`groups` have the same ranks as those of the optimizer, and send and receive tensors in host memory."""
        self._optimizer, self._groups = optimizer, groups
        pieces = {(parameter, state): tensor for state in STATES for parameter, tensor in optimizer.pieces(state)}
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in pieces.values()]
        self._buffer = host_buffer(sum(sizes))
        self._copies = {
            key: part[: tensor.nbytes].view(tensor.dtype)
            for (key, tensor), part in zip(pieces.items(), self._buffer.split(sizes), strict=True)
        }

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    @torch.no_grad()
    def take(self, states: Iterable[State]) -> None:
        """Copy these states; return when they may change again. What was copied before is overwritten."""
        for state in states:
            for parameter, tensor in self._optimizer.pieces(state):
                self._copies[parameter, state].copy_(tensor, non_blocking=True)
        synchronize()

    @torch.no_grad()
    def read(self, parameter: torch.nn.Parameter, state: State, *, to: int = 0) -> torch.Tensor | None:
        """Return one state of this rank's whole shard of a parameter, as `Optimizer.read` does, in host memory."""
        own = self._copies.get((parameter, state), self._buffer[:0].view(self._optimizer.dtype(state)))
        return self._optimizer.gather(parameter, own, self._groups, to=to)
