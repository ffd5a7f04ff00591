"""Weight transfers from GPU to GPU over NCCL: a trainer rank and two engine ranks share one GPU as three hosts.

It is the code of a run with weight_sync.transport=nccl but for vLLM.
"""

import os
import secrets
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

import pytest
import torch

from megatron_bapo.model.transfer_member import transfer_member
from megatron_bapo.model.weight_layouts import EngineLayout
from megatron_bapo.parallel.platform import DeviceStreams, claim_device, local_device
from megatron_bapo.rollout.weight_sources import weight_source
from megatron_bapo.weight_sync.membership import TransferFailed, offer_plan
from megatron_bapo.weight_sync.ray_store import open_store
from megatron_bapo.weight_sync.route import TransferGroup, WeightRoute
from megatron_bapo.weight_sync.slice_stream import send_slices
from tests.parallel.one_gpu import own_host
from tests.unit.weight_sync.examples import numbered, reading, whole_tensors

Figures = Callable[..., None]
VERSIONS = 3
SHAPES = {f"layers.{index}.weight": (1024, 4096) for index in range(12)}
PLAN = whole_tensors(numbered(SHAPES, 0), bucket_bytes=20 << 20, hosts=(1, 2))
LIMIT_S = 120.0


def receive(folder: Path, place: int, groups: list[TransferGroup], killed: bool) -> None:
    """Load a version in each group; in the last one die at the fourth tensor if `killed`."""
    os.environ |= own_host(place)
    claim_device()
    route = WeightRoute(folder, "nccl", first_place=place, rendezvous=f"file://{folder}/rendezvous", timeout_s=LIMIT_S)
    source = weight_source(route, EngineLayout(), 0, local_device())
    for version, group in enumerate(groups, start=1):
        source.verify(version, group)
        expected = numbered(SHAPES, version)
        for index, (name, tensor) in enumerate(source.read(version)):
            if killed and version == len(groups) and index == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            assert torch.equal(tensor.cpu(), expected[name])
    (folder / f"loaded-{place}").touch()


@pytest.mark.parametrize("killed", [False, True], ids=["healthy", "killed"])
def test_versions_reach_engine_ranks_over_nccl_also_if_one_of_them_dies(
    tmp_path: Path, figures: Figures, killed: bool
) -> None:
    os.environ |= own_host(0)
    claim_device()
    rendezvous = f"file://{tmp_path}/rendezvous"
    store, streams = open_store(rendezvous, LIMIT_S), DeviceStreams(local_device())
    offer_plan(store, PLAN)
    both = TransferGroup(secrets.token_hex(4), PLAN.digest, (0, 1, 2))
    left = TransferGroup(secrets.token_hex(4), PLAN.digest, (0, 2))
    context = get_context("spawn")
    processes = {
        place: context.Process(target=receive, args=(tmp_path, place, [both] * VERSIONS, killed and place == 1))
        for place in (1, 2)
    }
    for process in processes.values():
        process.start()
    member, seconds = transfer_member(rendezvous, 0, "127.0.0.1", LIMIT_S), dict[str, float]()

    def send(version: int, group: TransferGroup) -> None:
        content = {name: tensor.to(local_device()) for name, tensor in numbered(SHAPES, version).items()}
        start = perf_counter()
        member.join(group)
        with member.transfer() as chain:
            send_slices(PLAN, version, 0, reading(content), chain, streams)
        member.commit(version, num_senders=1)
        seconds[f"seconds_{version}"] = perf_counter() - start

    def notice() -> None:
        """Do what the rollout service does when it notices a lost engine."""
        processes[1].join(LIMIT_S)
        if processes[1].exitcode != 0:
            store.set(both.failed_key, "the engine at place 1 was lost")

    service = Thread(target=notice)
    service.start()
    for version in range(1, VERSIONS):
        send(version, both)
    if killed:
        with pytest.raises(TransferFailed):
            send(VERSIONS, both)
        store.set(both.next_key, left.to_json())
        send(VERSIONS, left)
    else:
        send(VERSIONS, both)
    service.join()
    codes: dict[int, Any] = {}
    for place, process in processes.items():
        process.join(LIMIT_S)
        process.kill()
        codes[place] = process.exitcode
    assert codes == {1: -signal.SIGKILL if killed else 0, 2: 0}
    assert (tmp_path / "loaded-2").exists()
    figures(**seconds)
