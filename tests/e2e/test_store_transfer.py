"""Transfers between the hosts' weight stores by Ray actors, when replies are lost."""

from pathlib import Path

from megatron_bapo.cluster.host_store import HostStore, host_store_name
from megatron_bapo.cluster.ray_cluster import create_actor, get_result, local_cluster
from megatron_bapo.cluster.store_transfer import StoreTransfer
from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.transport import WeightStore
from tests.unit.weight_sync.examples import halves, numbered, reading

SHAPES = {"w": (64, 64), "v": (32, 32)}
NUM_BYTES = 4 * (64 * 64 + 32 * 32)
PLAN = halves(SHAPES, dim=1, reader_dim=0, reader_hosts=(1, 1), bucket_bytes=4096)
LIMIT_S = 60.0


def publish(store: WeightStore, version: int) -> None:
    for rank in (0, 1):
        store.write(version, PLAN, rank, reading(numbered(SHAPES, version)))
    store.commit(version, PLAN)


def test_bytes_are_counted_when_a_reply_is_lost_and_a_repeated_call_returns_what_the_first_one_did(tmp_path: Path):
    class Forgetful(HostStore):
        """Loses its reply for the first version, which it has committed."""

        def receive(self, version: int, receivers: tuple[int, ...], base: int | None) -> None:
            super().receive(version, receivers, base)
            if version == 1:
                raise RunError("the reply was lost")

    stores = WeightStore.create(tmp_path), WeightStore.create(tmp_path)
    with local_cluster(2, 80, "transfer"):
        sender, receiver = (
            create_actor(
                kind,
                store.folder,
                host,
                name=host_store_name(host),
                stateless=True,
                timeout_s=LIMIT_S,
                log_file=tmp_path / f"{host}.log",
            )
            for host, (kind, store) in enumerate(zip((HostStore, Forgetful), stores, strict=True))
        )
        transfer = StoreTransfer((0,), (1,), full_every=1, limit_s=LIMIT_S)
        for version in (1, 2):
            publish(stores[0], version)
            assert transfer.deliver(version, PLAN) == NUM_BYTES
            assert stores[1].verify(version) == NUM_BYTES
        again = get_result(sender.send.remote(2, (1,), None), "sender", LIMIT_S)
        assert (again.num_bytes, again.num_whole) == (NUM_BYTES, len(PLAN.buckets))
        get_result(receiver.receive.remote(2, (1,), None), "receiver", LIMIT_S)
        assert stores[1].versions()[-1] == 2
    for store in stores:
        store.close()
