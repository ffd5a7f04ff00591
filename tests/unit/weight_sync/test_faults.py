"""Processes that are killed during a weight transfer."""

import importlib
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import FileStore

from megatron_bapo.errors import RunError
from megatron_bapo.parallel.platform import host_group
from megatron_bapo.weight_sync.host_chain import Chain, receive, send
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.transport import WeightStore
from tests.unit.weight_sync.examples import halves, numbered, reading, transfer

SHAPES = {f"layer.{index}": (8, 8) for index in range(6)}
PLAN = halves(SHAPES, dim=0, reader_dim=1, reader_hosts=(1, 1), bucket_bytes=256)
STORE = "megatron_bapo.weight_sync.transport"
CHAIN = "megatron_bapo.weight_sync.host_chain"
POINTS = {
    "before-the-file": (f"{STORE}:create", 1),
    "while-room-is-made": ("os:posix_fallocate", 3),
    "between-slices": (f"{STORE}:VersionWriter:write", 9),
    "before-a-manifest": (f"{STORE}:write_json", 1),
    "between-writing-and-naming-a-manifest": ("pathlib:Path:replace", 2),
    "before-the-commit": (f"{STORE}:write_json", 3),
    "at-the-first-bucket": (f"{CHAIN}:_Incoming:_targets", 1),
    "between-buckets": (f"{CHAIN}:_Incoming:_targets", 4),
    "at-a-checksum": (f"{CHAIN}:_Incoming:_verified", 5),
}


@pytest.fixture
def stores(tmp_path: Path) -> tuple[WeightStore, WeightStore]:
    """Return the stores of the trainer and of the engines, both at version 2."""
    both = WeightStore(tmp_path / "trainers"), WeightStore(tmp_path / "engines")
    for store in both:
        store.folder.mkdir(mode=0o700)
    for version in (1, 2):
        sync(*both, version)
    return both


def publish(trainers: WeightStore, version: int, plan: WeightPlan = PLAN) -> None:
    trainers.discard_before(version - 1)
    for rank in (0, 1):
        trainers.write(version, plan, rank, reading(numbered(SHAPES, version)))
    trainers.commit(version, plan)


def pull_from(trainers: WeightStore, engines: WeightStore, version: int) -> None:
    older = [number for number in engines.versions() if number in trainers.versions()]
    transfer({0: trainers, 1: engines}, version, base=max(older, default=None))
    engines.discard_before(version)


def sync(trainers: WeightStore, engines: WeightStore, version: int) -> None:
    publish(trainers, version)
    pull_from(trainers, engines, version)


def assert_serves(store: WeightStore, version: int) -> None:
    """Check that this version is the newest and complete, and that at most two models use memory."""
    assert store.versions()[-1] == version
    store.verify(version)
    expected = numbered(SHAPES, version)
    assert all(tensor.equal(expected[name]) for name, tensor in store.read(version))
    assert len(list(store.folder.rglob("*.safetensors"))) <= 2


def kill_at(target: str, call: int) -> None:
    """Make this process kill itself with SIGKILL at a call of a function."""
    module_name, *path, name = target.split(":")
    owner: Any = importlib.import_module(module_name)
    for attribute in path:
        owner = getattr(owner, attribute)
    function, calls = getattr(owner, name), iter(range(1, 1_000_000))

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, deadly)


def run_killed(task: Callable[[], object], point: str) -> None:
    """Run the task in a separate process that is killed at a point."""

    def until_killed() -> None:
        kill_at(*POINTS[point])
        task()

    process = get_context("fork").Process(target=until_killed)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("point", ["before-the-file", "between-slices", "before-a-manifest", "before-the-commit"])
@pytest.mark.parametrize("next_version", [3, 4])
def test_a_killed_sender_leaves_the_old_version_and_the_next_sync_is_right(
    stores: tuple[WeightStore, WeightStore], point: str, next_version: int
):
    trainers, engines = stores
    trainers.discard_before(2)
    run_killed(lambda: publish(trainers, 3), point)
    for store in stores:
        assert_serves(store, 2)
    sync(trainers, engines, next_version)
    for store in stores:
        assert_serves(store, next_version)


@pytest.mark.parametrize(
    "point", ["at-the-first-bucket", "between-buckets", "at-a-checksum", "between-writing-and-naming-a-manifest"]
)
@pytest.mark.parametrize("next_version", [3, 4])
def test_a_killed_receiver_leaves_the_old_version_and_the_next_sync_is_right(
    stores: tuple[WeightStore, WeightStore], point: str, next_version: int
):
    trainers, engines = stores
    publish(trainers, 3)
    run_killed(lambda: pull_from(trainers, engines, 3), point)
    assert_serves(engines, 2)
    if next_version > 3:
        publish(trainers, next_version)
    pull_from(trainers, engines, next_version)
    assert_serves(engines, next_version)


def test_a_file_whose_writer_is_killed_during_allocation_is_not_treated_as_allocated(tmp_path: Path):
    store = WeightStore(tmp_path / "trainers")
    store.folder.mkdir(mode=0o700)
    run_killed(lambda: publish(store, 3), "while-room-is-made")
    assert store.versions() == []
    publish(store, 3)
    assert_serves(store, 3)


def test_the_host_of_a_killed_owner_restarts_with_a_new_store_and_gets_everything(
    stores: tuple[WeightStore, WeightStore], tmp_path: Path
):
    """Kill the owner, the process that created the folder, while it pulls."""
    trainers, _ = stores
    publish(trainers, 3)
    parent = tmp_path / "shared-memory"
    parent.mkdir()
    run_killed(lambda: pull_from(trainers, WeightStore.create(parent), 3), "between-buckets")
    (abandoned,) = parent.iterdir()
    assert WeightStore(abandoned).versions() == []
    owned = WeightStore.create(parent)
    assert not abandoned.exists()
    pull_from(trainers, owned, 3)
    assert_serves(owned, 3)
    owned.close()


CHAIN_PLAN = halves(SHAPES, dim=0, reader_dim=1, reader_hosts=((1, 2), (1, 2)), bucket_bytes=256)
"""Every bucket goes from host 0 to host 1, which passes it on to host 2."""
FAILED = 3


def take_part(
    stores: Mapping[int, WeightStore], host: int, rendezvous: Path, killed_at: tuple[str, int] | None
) -> None:
    """Send or receive version 3, with the next host, in this process; end it with FAILED after a RunError."""
    if killed_at is not None:
        kill_at(*killed_at)
    group = host_group(FileStore(str(rendezvous), 3), host, 3, "127.0.0.1", timeout_s=60.0)
    chain = Chain(group, {other: other for other in range(3)}, (1, 2))
    try:
        if host == 0:
            send(stores[host], 3, host, chain, base=2)
        else:
            receive(stores[host], 3, CHAIN_PLAN, host, chain, base=2)
    except RunError:
        os._exit(FAILED)


@pytest.mark.parametrize("third", [1, 2, 3])
@pytest.mark.parametrize("victim", [0, 1, 2], ids=["sender", "relay", "receiver"])
def test_a_host_killed_at_a_third_of_a_transfer_stops_the_others_at_once(tmp_path: Path, victim: int, third: int):
    """Each host is a process. Survivors end long before the timeout; no store has a version that is not complete."""
    stores = {host: WeightStore(tmp_path / str(host)) for host in range(3)}
    for store in stores.values():
        store.folder.mkdir(mode=0o700)
    for version in (2, 3):
        publish(stores[0], version, CHAIN_PLAN)
        if version == 2:
            transfer(stores, 2)
    call = len(CHAIN_PLAN.buckets) * third // 3
    killed_at = (f"{CHAIN}:_header" if victim == 0 else f"{CHAIN}:_Incoming:_targets", call)
    context = get_context("fork")
    processes = [
        context.Process(
            target=take_part, args=(stores, host, tmp_path / "rendezvous", killed_at if host == victim else None)
        )
        for host in stores
    ]
    for process in processes:
        process.start()
    for host, process in enumerate(processes):
        process.join(50)
        assert process.exitcode in ((-signal.SIGKILL,) if host == victim else (0, FAILED)), (host, process.exitcode)
    assert stores[2].versions() == [2]
    for host in (1, 2):
        assert_serves(stores[host], stores[host].versions()[-1])
    lacking = {host: stores[host] for host in (1, 2) if stores[host].versions()[-1] == 2}
    transfer({0: stores[0], **lacking}, 3)
    for host in (1, 2):
        stores[host].discard_before(3)
        assert_serves(stores[host], 3)
