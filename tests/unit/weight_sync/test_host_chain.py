from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync import host_chain
from megatron_bapo.weight_sync.host_chain import Group
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.transport import SPARE, WEIGHTS, WeightStore
from tests.unit.weight_sync.examples import halves, reading, transfer

SHAPES = {"w": (64, 64), "v": (32, 32)}
NUM_BYTES = 4 * (64 * 64 + 32 * 32)
Messages = defaultdict[tuple[int, int], list[tuple[int, int]]]
PLAN = halves(SHAPES, dim=1, reader_dim=0, reader_hosts=(1, 1), bucket_bytes=4096)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[WeightStore, WeightStore]]:
    """Return the trainer's store and that of a host with engines."""
    stores = WeightStore.create(tmp_path), WeightStore.create(tmp_path)
    yield stores
    for store in stores:
        store.close()


def weights(version: int, num_changed: int = 5) -> dict[str, torch.Tensor]:
    """Return random tensors in which each later version sets a few more elements to NaN, -0.0 or a number."""
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


@pytest.mark.parametrize("prepared", [True, False])
def test_differences_version_after_version_give_the_bits_of_full_transfers(
    hosts: tuple[WeightStore, WeightStore], prepared: bool
):
    trainers, engines = hosts
    for version in range(1, 6):
        publish(trainers, version, weights(version))
        base = None if version in (1, 4) else version - 1
        (sent,) = transfer({0: trainers, 1: engines}, version, base)
        engines.discard_before(version)
        if prepared:
            engines.prepare(version)
        assert_has(engines, version, weights(version))
        if base is None:
            assert sent == NUM_BYTES
        else:
            assert sent < NUM_BYTES / 20


def test_a_bucket_that_changed_everywhere_is_sent_whole(hosts: tuple[WeightStore, WeightStore]):
    trainers, engines = hosts
    publish(trainers, 1, weights(1))
    transfer({0: trainers, 1: engines}, 1)
    tensors = weights(1)
    tensors["v"] += 1.0
    publish(trainers, 2, tensors)
    (sent,) = transfer({0: trainers, 1: engines}, 2, base=1)
    assert tensors["v"].nbytes <= sent < tensors["v"].nbytes + NUM_BYTES / 20
    assert_has(engines, 2, tensors)


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)


def assert_refused_and_then_sent_whole(trainers: WeightStore, engines: WeightStore, version: int) -> None:
    publish(trainers, version, weights(version))
    with pytest.raises(RunError, match=rf"bucket \d of policy version {version} arrived with the checksum"):
        transfer({0: trainers, 1: engines}, version, base=version - 1)
    assert engines.versions() == [version - 1]
    transfer({0: trainers, 1: engines}, version)
    assert_has(engines, version, weights(version))


def test_a_damaged_old_version_and_a_version_without_its_base_are_never_committed(
    hosts: tuple[WeightStore, WeightStore],
):
    trainers, engines = hosts
    publish(trainers, 1, weights(1))
    transfer({0: trainers, 1: engines}, 1)
    damage(engines.folder / "00000001" / WEIGHTS)
    assert_refused_and_then_sent_whole(trainers, engines, 2)


def prepare_for_differences(trainers: WeightStore, engines: WeightStore) -> None:
    """Transfer versions 1 and 2, and prepare the engines' store for differences to version 2."""
    for version in (1, 2):
        publish(trainers, version, weights(version))
        transfer({0: trainers, 1: engines}, version)
    engines.discard_before(2)
    engines.prepare(2)


def test_a_host_that_has_prepared_writes_the_differences_without_reading_the_old_version(
    hosts: tuple[WeightStore, WeightStore],
):
    trainers, engines = hosts
    prepare_for_differences(trainers, engines)
    damage(engines.folder / "00000002" / WEIGHTS)
    publish(trainers, 3, weights(3))
    transfer({0: trainers, 1: engines}, 3, base=2)
    assert_has(engines, 3, weights(3))


def test_a_prepared_file_that_was_damaged_is_never_committed(hosts: tuple[WeightStore, WeightStore]):
    trainers, engines = hosts
    prepare_for_differences(trainers, engines)
    damage(engines.folder / SPARE)
    assert_refused_and_then_sent_whole(trainers, engines, 3)


class Unreliable:
    """Changes one bit of everything that is sent."""

    def __init__(self, group: Group) -> None:
        self._group, self.recv = group, group.recv

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> Any:
        (content,) = tensors
        damaged = content.clone()
        damaged.view(-1)[-1] ^= 1
        return self._group.send([damaged], dst, tag)


def test_bytes_that_changed_in_transit_are_never_committed(hosts: tuple[WeightStore, WeightStore]):
    trainers, engines = hosts
    publish(trainers, 1, weights(1))
    with pytest.raises(RunError, match=r"bucket 0 of policy version 1 arrived with the checksum \w+, not \w+"):
        transfer({0: trainers, 1: engines}, 1, wrap=lambda host, group: group if host else Unreliable(group))
    assert engines.versions() == []
    transfer({0: trainers, 1: engines}, 1)
    assert_has(engines, 1, weights(1))


def test_a_version_that_the_trainer_has_discarded_is_not_sent(hosts: tuple[WeightStore, WeightStore]):
    trainers, engines = hosts
    for version in (1, 2):
        publish(trainers, version, weights(version))
    trainers.discard_before(2)
    with pytest.raises(RunError, match="version 1 is not committed"):
        transfer({0: trainers, 1: engines}, 1)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("reader_dim", [0, 1])
def test_two_trainer_hosts_send_their_parts_once_and_hosts_pass_them_on(
    tmp_path: Path, dim: int, reader_dim: int, monkeypatch: pytest.MonkeyPatch
):
    """Send pieces of 100 bytes, and different parts to the hosts."""
    monkeypatch.setattr(host_chain, "PIECE_BYTES", 100)
    plan = halves(
        SHAPES, dim=dim, reader_dim=reader_dim, sender_hosts=(0, 1), reader_hosts=[(2, 3, 4), (3, 4)], bucket_bytes=4096
    )
    stores = {host: WeightStore.create(tmp_path) for host in range(5)}
    for version, base in ((1, None), (2, 1), (3, 2)):
        for host in (0, 1):
            stores[host].write(version, plan, host, reading(weights(version)))
            stores[host].commit(version, plan, host)
        sent = transfer(stores, version, base, num_senders=2)
        expected = [plan.num_bytes(plan.sent_by(rank)) for rank in (0, 1)]
        assert sent == expected if base is None else all(a < b / 10 for a, b in zip(sent, expected, strict=True))
        for host in (2, 3, 4):
            for reader in (0, 1)[: 1 if host == 2 else 2]:
                stores[host].verify(version, reader)
        for host in (3, 4):
            assert_has(stores[host], version, weights(version))
            stores[host].discard_before(version)
            stores[host].prepare(version)
    for store in stores.values():
        store.close()


class Recorder:
    """Records the sizes of a host's messages, by sending and receiving rank, in the order in which they are begun."""

    def __init__(self, host: int, group: Group, sent: Messages, received: Messages) -> None:
        self._host, self._group, self._sent, self._received = host, group, sent, received

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> Any:
        self._sent[self._host, dst].append((tensors[0].nbytes, tag))
        return self._group.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> Any:
        self._received[src, self._host].append((tensors[0].nbytes, tag))
        return self._group.recv(tensors, src, tag)


@pytest.mark.parametrize("bucket_bytes", [512, 4096])
def test_two_hosts_begin_the_messages_between_them_in_the_same_order_and_without_tags(
    tmp_path: Path, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    """As NCCL needs it: it ignores tags, and its messages between two ranks have one order for both directions.

    Host 3 needs several buckets in a row that host 2, which passes the others on to it, does not need.
    """
    monkeypatch.setattr(host_chain, "PIECE_BYTES", 100)
    plan = halves(
        SHAPES,
        dim=1,
        reader_dim=0,
        sender_hosts=(0, 1),
        reader_hosts=[(2, 3, 4), (3, 4)],
        bucket_bytes=bucket_bytes,
    )
    stores = {host: WeightStore.create(tmp_path) for host in range(5)}
    sent, received = Messages(list), Messages(list)
    for version, base in ((1, None), (2, 1)):
        for host in (0, 1):
            stores[host].write(version, plan, host, reading(weights(version)))
            stores[host].commit(version, plan, host)
        transfer(stores, version, base, num_senders=2, wrap=lambda host, group: Recorder(host, group, sent, received))
    assert sent == received
    assert {(0, 2), (0, 3), (2, 3), (3, 4)} <= sent.keys()
    assert all(source < destination for source, destination in sent)
    assert {tag for messages in sent.values() for _, tag in messages} == {0}
    assert len({num_bytes for num_bytes, _ in sent[3, 4]}) > 2, "headers, pieces and differences"
    for store in stores.values():
        store.close()
