"""Offloads a rank's parameters and optimizer states to host memory while engines use its device, and loads them back.

Megatron keeps views of flat buffers in many places. Storages are therefore emptied and refilled in place, which keeps
all views valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_bapo.model.build import PolicyModel, finish_param_gather
from megatron_bapo.model.precision import discard_fp8_copies
from megatron_bapo.parallel.platform import host_buffers, local_device, release_cached_memory
from megatron_bapo.trainer.worker import Worker


class Storages:
    """Device storages that can be emptied and later refilled with their values or with zeros."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, keep_values: bool = True) -> None:
        """Collect the storages of those tensors that are on this rank's device; shared storages are counted once."""
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device == local_device() and storage.size():
                storages[storage.data_ptr()] = storage
        self._storages = list(storages.values())
        self._sizes = [storage.size() for storage in self._storages]
        self._copies = [host_buffers(size) for size in self._sizes] if keep_values else None
        self.is_offloaded = False

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def addresses(self) -> set[int]:
        """Addresses of the storages while they are on the device."""
        return {storage.data_ptr() for storage in self._storages}

    def offload(self) -> None:
        if self.is_offloaded:
            return
        if self._copies is not None:
            for storage, copies in zip(self._storages, self._copies, strict=True):
                for part, copy in _parts(storage, copies):
                    copy.copy_(part, non_blocking=True)
        release_cached_memory()  # waits for the copies before their source is freed
        for storage in self._storages:
            storage.resize_(0)
        release_cached_memory()
        self.is_offloaded = True

    def onload(self) -> None:
        if not self.is_offloaded:
            return
        for index, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
            storage.resize_(size)
            if self._copies is None:
                _bytes(storage).zero_()
            else:
                for part, copy in _parts(storage, self._copies[index]):
                    part.copy_(copy, non_blocking=True)
        release_cached_memory()  # waits for the copies before the next offload overwrites their source
        self.is_offloaded = False


class TrainerMemory:
    """Device memory that this rank keeps between updates. Create it after the model and the optimizer."""

    def __init__(self, worker: Worker, frozen: Sequence[PolicyModel] = ()) -> None:
        """`frozen` are the reference model and the teacher, as far as the run has them."""
        self._worker = worker
        self._models = [chunk.gpt for model in (worker.model, *frozen) for chunk in model.chunks]
        self.parameters = Storages(p.data for gpt in self._models for p in gpt.parameters())
        shared = self.parameters.addresses  # an fp32 model's parameters are their own main parameters
        self.optimizer = Storages(
            state for state in worker.optimizer.states() if state.untyped_storage().data_ptr() not in shared
        )
        self.gradients = Storages(_gradient_buffers(worker.model), keep_values=False)

    def offload_all_but_parameters(self) -> None:
        """Offload everything that readers of the weights do not need. Gradients and FP8 copies are discarded."""
        finish_param_gather([chunk.ddp for chunk in self._worker.model.chunks])
        if not self.gradients.is_offloaded:
            self._worker.optimizer.zero_grad()
        for gpt in self._models:
            discard_fp8_copies(gpt)
        self.optimizer.offload()
        self.gradients.offload()

    def offload(self) -> None:
        self.offload_all_but_parameters()
        self.parameters.offload()

    def onload(self) -> None:
        self.parameters.onload()
        self.gradients.onload()
        self.optimizer.onload()


def _gradient_buffers(model: PolicyModel) -> Iterator[torch.Tensor]:
    for chunk in model.chunks:
        ddp: Any = chunk.ddp
        yield from (buffer.grad_data for buffer in ddp.buffers + ddp.expert_parallel_buffers)


def _parts(storage: torch.UntypedStorage, copies: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over pairs of a part of the storage and its copy."""
    return zip(_bytes(storage).split([copy.numel() for copy in copies]), copies, strict=True)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
