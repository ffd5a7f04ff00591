from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.relay import Pulled, StoreServer, pull
from megatron_bapo.weight_sync.transport import WeightStore
from tests.unit.weight_sync.examples import halves, reading

SHAPES = {"w": (64, 64), "v": (32, 32)}
NUM_BYTES = 4 * (64 * 64 + 32 * 32)
PLAN = halves(SHAPES, dim=1, reader_dim=0, reader_hosts=(1, 1), bucket_bytes=4096)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[WeightStore, WeightStore]]:
    """The trainer's store and that of a host with engines."""
    stores = WeightStore.create(tmp_path), WeightStore.create(tmp_path)
    yield stores
    for store in stores:
        store.close()


def weights(version: int, num_changed: int = 5) -> dict[str, torch.Tensor]:
    """Random, and in each version after the first a few other elements are NaN, -0.0 or a number."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for step in range(1, version):
        for tensor in tensors.values():
            flat = tensor.view(-1)
            chosen = torch.randint(len(flat), (num_changed,), generator=generator)
            flat[chosen] = torch.tensor([torch.nan, -0.0, step, 0.0, -step])[torch.arange(num_changed) % 5]
    return tensors


def publish(store: WeightStore, version: int, tensors: dict[str, torch.Tensor], plan: WeightPlan = PLAN) -> None:
    store.discard_before(version - 1)
    for rank in (0, 1):
        store.write(version, plan, rank, reading(tensors))
    store.commit(version, plan)


def assert_has(store: WeightStore, version: int, tensors: dict[str, torch.Tensor]) -> None:
    assert store.verify(version) == NUM_BYTES
    for name, tensor in store.read(version):
        assert tensor.view(torch.int32).equal(tensors[name].view(torch.int32))


def test_a_chain_of_changes_gives_the_bits_of_full_syncs_and_is_broken_by_one(hosts: tuple[WeightStore, WeightStore]):
    trainers, engines = hosts
    source = {0: StoreServer(trainers.folder)}
    moved: list[Pulled] = []
    for version in range(1, 10):
        publish(trainers, version, weights(version))
        moved.append(pull(engines, version, 1, source, full_every=4))
        engines.discard_before(version)
        assert_has(engines, version, weights(version))
    whole = [pulled.num_changed == 0 for pulled in moved]
    assert whole == [True, False, False, True, False, False, False, True, False]
    for pulled, is_whole in zip(moved, whole, strict=True):
        assert pulled.num_whole + pulled.num_changed == len(PLAN.buckets)
        headers = 18 * len(PLAN.buckets)
        assert pulled.num_bytes == NUM_BYTES + headers if is_whole else pulled.num_bytes < NUM_BYTES / 20


def test_a_bucket_that_changed_everywhere_comes_whole_among_others(hosts: tuple[WeightStore, WeightStore]):
    trainers, engines = hosts
    source = {0: StoreServer(trainers.folder)}
    publish(trainers, 1, weights(1))
    pull(engines, 1, 1, source, full_every=100)
    tensors = weights(1)
    tensors["v"] += 1.0
    publish(trainers, 2, tensors)
    moved = pull(engines, 2, 1, source, full_every=100)
    assert 0 < moved.num_whole < len(PLAN.buckets)
    assert_has(engines, 2, tensors)


def test_a_host_that_missed_versions_or_comes_anew_gets_the_newest_without_the_trainer(
    hosts: tuple[WeightStore, WeightStore], tmp_path: Path
):
    trainers, engines = hosts
    source = {0: StoreServer(trainers.folder)}
    publish(trainers, 1, weights(1))
    pull(engines, 1, 1, source, full_every=100)
    for version in (2, 3):
        publish(trainers, version, weights(version))
    assert pull(engines, 3, 1, source, full_every=100).num_changed == 0
    anew = WeightStore.create(tmp_path)
    assert pull(anew, 3, 1, source, full_every=100).num_changed == 0
    for store in (engines, anew):
        assert_has(store, 3, weights(3))
    anew.close()


def test_after_another_layout_everything_travels(hosts: tuple[WeightStore, WeightStore]):
    trainers, engines = hosts
    source = {0: StoreServer(trainers.folder)}
    publish(trainers, 1, weights(1))
    pull(engines, 1, 1, source, full_every=100)
    publish(trainers, 2, weights(2), halves(SHAPES, dim=0, reader_dim=0, reader_hosts=(1, 1)))
    assert pull(engines, 2, 1, source, full_every=100).num_changed == 0
    assert_has(engines, 2, weights(2))


def test_a_damaged_old_version_is_noticed_and_the_bucket_is_asked_for_whole(hosts: tuple[WeightStore, WeightStore]):
    trainers, engines = hosts
    source = {0: StoreServer(trainers.folder)}
    publish(trainers, 1, weights(1))
    pull(engines, 1, 1, source, full_every=100)
    file = engines.folder / "00000001" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)
    publish(trainers, 2, weights(2))
    assert pull(engines, 2, 1, source, full_every=100).num_whole == 1
    assert_has(engines, 2, weights(2))


def test_bytes_that_were_changed_on_the_way_are_never_committed(hosts: tuple[WeightStore, WeightStore]):
    class Unreliable(StoreServer):
        def message(self, version: int, number: int, base: int | None) -> bytes:
            message = super().message(version, number, base)
            return message[:-1] + bytes([message[-1] ^ 1])

    trainers, engines = hosts
    publish(trainers, 1, weights(1))
    with pytest.raises(RunError, match="bucket 0 of policy version 1 did not arrive from host 0 as it was written"):
        pull(engines, 1, 1, {0: Unreliable(trainers.folder)}, full_every=100)
    assert engines.versions() == []
    pull(engines, 1, 1, {0: StoreServer(trainers.folder)}, full_every=100)
    assert_has(engines, 1, weights(1))


def test_a_version_that_the_trainer_has_given_up_is_not_served(hosts: tuple[WeightStore, WeightStore]):
    trainers, engines = hosts
    for version in (1, 2):
        publish(trainers, version, weights(version))
    trainers.discard_before(2)
    with pytest.raises(RunError, match="version 1 is not committed"):
        pull(engines, 1, 1, {0: StoreServer(trainers.folder)}, full_every=100)


def test_two_of_the_trainers_hosts_give_a_part_each(tmp_path: Path):
    plan = halves(SHAPES, dim=1, reader_dim=0, sender_hosts=(0, 1), reader_hosts=(2, 2))
    stores = [WeightStore.create(tmp_path) for _ in range(3)]
    for version in (1, 2):
        for host in (0, 1):
            stores[host].write(version, plan, host, reading(weights(version)))
            stores[host].commit(version, plan, host)
        sources = {host: StoreServer(stores[host].folder) for host in (0, 1)}
        pull(stores[2], version, 2, sources, full_every=100)
        assert_has(stores[2], version, weights(version))
    for store in stores:
        store.close()
