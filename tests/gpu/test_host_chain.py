"""Weight transfers between hosts over NCCL, which has no tags: messages between two hosts must begin in one order.

Three processes on one GPU take part as if each was a host of its own.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from megatron_bapo.parallel.platform import claim_device, has_gpu, local_device, transfer_group
from megatron_bapo.weight_sync.host_chain import Chain, Group, receive, send
from megatron_bapo.weight_sync.transport import WeightStore
from tests.parallel.one_gpu import own_host
from tests.unit.weight_sync.examples import numbered, reading, whole_tensors

Figures = Callable[..., None]
HOSTS, VERSIONS = 3, 3
SHAPES = {f"layer.{index}": (1024, 4096) for index in range(12)}
NUM_BYTES = 12 * 1024 * 4096 * 4
PLAN = whole_tensors(numbered(SHAPES, 0), bucket_bytes=20 << 20, hosts=range(HOSTS))
TIMEOUT_S = 60.0


@dataclass
class Staged:
    """Sends and receives host memory through the memory of a device, with a group that ignores tags."""

    group: Group
    device: torch.device

    def send(self, tensors: list[torch.Tensor], dst: int, _tag: int, /) -> "Transfer":
        staged = tensors[0].to(self.device)
        return Transfer(self.group.send([staged], dst, 0), staged, None)

    def recv(self, tensors: list[torch.Tensor], src: int, _tag: int, /) -> "Transfer":
        staged = torch.empty_like(tensors[0], device=self.device)
        return Transfer(self.group.recv([staged], src, 0), staged, tensors[0])


@dataclass
class Transfer:
    """A message under way, and the host memory that it is received to."""

    work: Any
    staged: torch.Tensor
    target: torch.Tensor | None

    def wait(self) -> None:
        self.work.wait()
        if self.target is not None:
            self.target.copy_(self.staged)
        if has_gpu():
            torch.cuda.current_stream().synchronize()


def publish(store: WeightStore, version: int) -> None:
    store.discard_before(version - 1)
    store.write(version, PLAN, 0, reading(numbered(SHAPES, version)))
    store.commit(version, PLAN)


def take_part(host: int, folder: Path) -> None:
    """Host 0 sends all versions, host 1 passes them on to host 2. Odd versions are sent whole."""
    os.environ |= own_host(host)
    claim_device()
    store = WeightStore(folder / str(host))
    store.folder.mkdir(mode=0o700)
    group = transfer_group(FileStore(f"{folder}/rendezvous", HOSTS), host, HOSTS, "127.0.0.1", TIMEOUT_S)
    chain = Chain(Staged(group, local_device()), {other: other for other in range(HOSTS)}, (1, 2))
    for version in range(1, VERSIONS + 1):
        base = None if version % 2 else version - 1
        if host == 0:
            publish(store, version)
            start = perf_counter()
            send(store, version, host, chain, base)
            (folder / f"seconds-{version}").write_text(str(perf_counter() - start))
        else:
            store.discard_before(version)
            receive(store, version, PLAN, host, chain, base)


def test_versions_reach_all_hosts_over_nccl(tmp_path: Path, figures: Figures) -> None:
    context, processes = get_context("spawn"), []
    for host in range(HOSTS):
        processes.append(context.Process(target=take_part, args=(host, tmp_path)))
        processes[-1].start()
    for process in processes:
        process.join(2 * TIMEOUT_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * HOSTS
    for host in range(HOSTS):
        store = WeightStore(tmp_path / str(host))
        assert store.versions()[-1] == VERSIONS
        assert store.verify(VERSIONS) == NUM_BYTES
        expected = numbered(SHAPES, VERSIONS)
        assert all(tensor.equal(expected[name]) for name, tensor in store.read(VERSIONS))
    figures(**{f"seconds_{version}": float((tmp_path / f"seconds-{version}").read_text()) for version in (1, 2, 3)})
