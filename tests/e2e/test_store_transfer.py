"""Transfers between the hosts' weight stores by Ray actors, when replies are lost."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_bapo.cluster.host_store import HostStore, host_store_name
from megatron_bapo.cluster.ray_cluster import create_actor, get_result, local_cluster
from megatron_bapo.cluster.store_transfer import StoreTransfer
from megatron_bapo.controller.rollout_client import SERVICE, RolloutClient
from megatron_bapo.controller.rollout_service import RolloutService
from megatron_bapo.errors import RunError
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.weight_sync.transport import PREPARED, BucketWriter, WeightStore
from tests.unit.config.examples import config
from tests.unit.weight_sync.examples import halves, numbered, reading

SHAPES = {"w": (64, 64), "v": (32, 32)}
NUM_BYTES = 4 * (64 * 64 + 32 * 32)
PLAN = halves(SHAPES, dim=1, reader_dim=0, reader_hosts=(1, 1), bucket_bytes=4096)
LIMIT_S = 60.0


def publish(store: WeightStore, version: int) -> None:
    for rank in (0, 1):
        store.write(version, PLAN, rank, reading(numbered(SHAPES, version)))
    store.commit(version, PLAN)


def host_stores(tmp_path: Path, stores: tuple[WeightStore, WeightStore], receiver: type[HostStore]) -> list[Any]:
    """Create the actors of a sender and of a receiver."""
    return [
        create_actor(
            kind,
            store.folder,
            host,
            name=host_store_name(host),
            stateless=True,
            limit_s=LIMIT_S,
            stall_timeout_s=LIMIT_S,
            log_file=tmp_path / f"{host}.log",
        )
        for host, (kind, store) in enumerate(zip((HostStore, receiver), stores, strict=True))
    ]


def test_bytes_are_counted_when_a_reply_is_lost_and_a_repeated_call_returns_what_the_first_one_did(tmp_path: Path):
    class Forgetful(HostStore):
        """Loses its reply for the first version, which it has committed."""

        def receive(self, version: int, receivers: tuple[int, ...], base: int | None) -> None:
            super().receive(version, receivers, base)
            if version == 1:
                raise RunError("the reply was lost")

    stores = WeightStore.create(tmp_path), WeightStore.create(tmp_path)
    with local_cluster(2, 80, "transfer"):
        sender, receiver = host_stores(tmp_path, stores, Forgetful)
        transfer = StoreTransfer((0,), (1,), full_every=1, limit_s=LIMIT_S)
        for version in (1, 2):
            publish(stores[0], version)
            assert transfer.deliver(version, PLAN) == NUM_BYTES
            assert stores[1].verify(version) == NUM_BYTES
        assert get_result(sender.send.remote(2, (1,), None), "sender", LIMIT_S) == NUM_BYTES
        get_result(receiver.receive.remote(2, (1,), None), "receiver", LIMIT_S)
        assert stores[1].versions()[-1] == 2
    for store in stores:
        store.close()


def test_a_receiver_waits_until_its_file_is_prepared_and_prepares_none_for_a_whole_version(tmp_path: Path):
    bases = tmp_path / "bases.jsonl"

    class SlowStore(WeightStore):
        """Takes a second for each preparation, and cannot prepare for differences to version 5."""

        def prepare(self, version: int) -> None:
            time.sleep(1.0)
            if version == 5:
                raise OSError("no space left")
            super().prepare(version)

        @contextmanager
        def bucket_writer(self, *args: Any) -> Iterator[BucketWriter]:
            with super().bucket_writer(*args) as writer, bases.open("a") as file:
                print(json.dumps(writer.base), file=file)
                yield writer

    class Receiver(HostStore):
        def __init__(self, folder: Path, host: int, **settings: Any) -> None:
            super().__init__(folder, host, **settings)
            self._store = SlowStore(folder)

    stores = WeightStore.create(tmp_path), WeightStore.create(tmp_path)
    with local_cluster(2, 80, "transfer"):
        _actors = host_stores(tmp_path, stores, Receiver)  # they end with their handles
        transfer = StoreTransfer((0,), (1,), full_every=4, limit_s=LIMIT_S)
        for version in range(1, 7):
            publish(stores[0], version)
            transfer.deliver(version, PLAN)
            assert stores[1].verify(version) == NUM_BYTES
            transfer.prepare(version)
    assert [*map(json.loads, bases.read_text().splitlines())] == [None, None, 2, None, 4, None]
    assert "no file is prepared for policy version 6: OSError('no space left')" in (tmp_path / "1.log").read_text()
    for store in stores:
        store.close()


class Late:
    def answer(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def test_the_limit_of_a_transfer_is_that_of_all_hosts_together():
    with local_cluster(3, 80, "late"):
        transfer = StoreTransfer((), (), full_every=1, limit_s=LIMIT_S)
        stores = {host: create_actor(Late, name=host_store_name(host)) for host in range(3)}
        transfer._results(stores, lambda host, store: store.answer.remote(0.0), LIMIT_S)  # all have started
        seconds = {0: 0.0, 1: 60.0, 2: 9.0}
        results, failure = transfer._results(stores, lambda host, store: store.answer.remote(seconds[host]), 6.0)
    assert results == {0: 0.0}
    assert str(failure).startswith(f"{host_store_name(2)} did not answer within 6 s")


def test_a_weight_update_prepares_the_engine_hosts_for_differences_once_the_engines_have_the_version(tmp_path: Path):
    """The service has no engines here, so all of its engines have loaded a version at once."""
    byte_tokenizer(["0123456789"]).save_pretrained(tmp_path)
    run = config(
        run_dir=str(tmp_path), model__create=None, model__path=str(tmp_path), data__chat_template=False,
        data__max_prompt_length=1000, weight_sync__full_every=100,
    )  # fmt: skip
    (tmp_path / "logs").mkdir()
    stores = WeightStore.create(tmp_path), WeightStore.create(tmp_path)
    with local_cluster(3, 80, "update"):
        _actors = [
            *host_stores(tmp_path, stores, HostStore),
            create_actor(RolloutService, run, [], name=SERVICE),
        ]  # they end with their handles
        client = RolloutClient(run, sender_hosts=(0,), engine_hosts=((1,),))
        for version in (1, 2):
            publish(stores[0], version)
            client.load_weights(version, PLAN)
        prepared, deadline = stores[1].folder / PREPARED, time.monotonic() + LIMIT_S
        while not prepared.exists():
            assert time.monotonic() < deadline, "no file was prepared"
            time.sleep(0.05)
        assert json.loads(prepared.read_text())["version"] == 2
    for store in stores:
        store.close()
