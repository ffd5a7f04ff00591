import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.transport import WeightStore

KIB = 1024


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    store = WeightStore.create(tmp_path)
    yield store
    store.close()


def publish(store: WeightStore, version: int, tensors: dict[str, torch.Tensor], bucket_bytes: int = KIB) -> None:
    store.write(version, "stage-0", tensors.items(), bucket_bytes)
    store.commit(version, ["stage-0"])


def bucket_files(store: WeightStore) -> list[Path]:
    return sorted(store.folder.rglob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_what_was_written_is_read_bit_for_bit_and_in_order(store: WeightStore, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {"z": (3, 5), "a": (), "larger_than_a_bucket": (40, 64), "empty": (0, 4), "m": (7,)}
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    publish(store, 3, tensors)
    read = dict(store.read(3))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert read[name].dtype == dtype
        assert read[name].shape == tensor.shape
        assert read[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_a_tensor_larger_than_a_bucket_has_a_file_of_its_own(store: WeightStore):
    tensors = {"small": torch.ones(10), "large": torch.ones(1000), "last": torch.ones(10)}
    written = store.write(1, "stage-0", tensors.items(), KIB)
    assert [list(bucket.tensors) for bucket in written] == [["small"], ["large"], ["last"]]


def test_views_of_one_buffer_and_transposed_views_are_written(store: WeightStore):
    buffer = torch.nn.Parameter(torch.arange(12.0))
    publish(store, 1, {"head": buffer[:4], "tail": buffer[4:], "transposed": torch.arange(6.0).view(2, 3).t()})
    read = dict(store.read(1))
    assert read["tail"].equal(buffer[4:].detach())
    assert read["transposed"].equal(torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_the_manifest_names_every_writers_tensors_and_all_bytes(store: WeightStore):
    store.write(5, "stage-0", [("embed", torch.ones(4, 2))], KIB)
    store.write(5, "stage-1", [("head", torch.ones(3, dtype=torch.bfloat16))], KIB)
    assert store.commit(5, ["stage-0", "stage-1"]) == store.manifest(5)
    assert store.manifest(5).total_bytes == 4 * 2 * 4 + 3 * 2
    found = {name: (info.shape, info.dtype) for name, info in store.manifest(5).tensors().items()}
    assert found == {"embed": ((4, 2), "float32"), "head": ((3,), "bfloat16")}


@pytest.mark.parametrize("version", [6, 7])
def test_versions_only_grow(store: WeightStore, version: int):
    publish(store, 7, {"w": torch.ones(1)})
    with pytest.raises(RunError, match=f"version {version} is stale: the store already has 7"):
        store.write(version, "stage-0", [("w", torch.zeros(1))], KIB)
    with pytest.raises(RunError, match=f"version {version} is stale"):
        store.commit(version, ["stage-0"])
    assert dict(store.read(7))["w"].item() == 1


def test_a_flipped_bit_is_found_and_the_file_is_named(store: WeightStore):
    publish(store, 1, {"w": torch.ones(100)})
    (file,) = bucket_files(store)
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    (expected,) = (bucket.checksum for bucket in store.manifest(1).buckets)
    with pytest.raises(
        RunError, match=rf"stage-0-00000\.safetensors is damaged: expected BLAKE3 {expected}, found \w+"
    ):
        list(store.read(1))


@pytest.mark.parametrize("damage", [lambda file: os.truncate(file, 50), Path.unlink], ids=["truncated", "deleted"])
def test_a_truncated_or_deleted_file_is_found(store: WeightStore, damage):
    publish(store, 1, {"w": torch.ones(100)})
    damage(bucket_files(store)[0])
    with pytest.raises(RunError, match="is damaged"):
        list(store.read(1))


def test_a_commit_without_all_writers_names_those_that_are_missing(store: WeightStore):
    store.write(1, "stage-0", [("w", torch.ones(1))], KIB)
    with pytest.raises(RunError, match="nothing complete from stage-1, stage-2"):
        store.commit(1, ["stage-0", "stage-1", "stage-2"])
    assert store.versions() == []


def test_two_writers_of_one_tensor_are_refused(store: WeightStore):
    for writer in ("stage-0", "stage-1"):
        store.write(1, writer, [("shared", torch.ones(1))], KIB)
    with pytest.raises(RunError, match="has tensor shared twice"):
        store.commit(1, ["stage-0", "stage-1"])


def test_one_writer_with_a_tensor_twice_in_different_buckets_is_refused(store: WeightStore):
    store.write(1, "stage-0", [("w", torch.ones(100)), ("w", torch.ones(100))], 100)
    with pytest.raises(RunError, match="has tensor w twice"):
        store.commit(1, ["stage-0"])


def test_an_uncommitted_version_cannot_be_read(store: WeightStore):
    store.write(2, "stage-0", [("w", torch.ones(1))], KIB)
    with pytest.raises(RunError, match="version 2 is not committed"):
        store.read(2)


def test_a_write_that_fails_halfway_is_not_taken_for_complete_even_after_a_complete_one(store: WeightStore):
    def export():
        yield "a", torch.ones(400)
        raise KeyboardInterrupt

    store.write(1, "stage-0", [("a", torch.zeros(400)), ("b", torch.zeros(400))], KIB)
    with pytest.raises(KeyboardInterrupt):
        store.write(1, "stage-0", export(), KIB)
    with pytest.raises(RunError, match="nothing complete from stage-0"):
        store.commit(1, ["stage-0"])
    publish(store, 1, {"a": torch.full((400,), 2.0)})
    assert {name: tensor.mean().item() for name, tensor in store.read(1)} == {"a": 2.0}


def test_a_manifest_that_was_cut_short_is_not_a_version(store: WeightStore):
    store.write(1, "stage-0", [("w", torch.ones(1))], KIB)
    (store.folder / "00000001" / "COMMITTED.partial").write_text(json.dumps({"version": 1})[:5])
    assert store.versions() == []
    store.commit(1, ["stage-0"])
    assert store.versions() == [1]


def test_older_versions_go_unfinished_ones_too_and_what_is_mapped_stays_readable(store: WeightStore):
    store.write(0, "stage-0", [("w", torch.zeros(1))], KIB)
    for version in (1, 2, 4):
        publish(store, version, {"w": torch.full((100,), float(version))})
    mapped = dict(store.read(1))["w"]
    store.discard_before(4)
    assert store.versions() == [4]
    assert sorted(path.name for path in store.folder.iterdir() if path.is_dir()) == ["00000004"]
    assert mapped.equal(torch.ones(100))


def test_the_newest_version_is_never_discarded(store: WeightStore):
    publish(store, 4, {"w": torch.ones(1)})
    store.discard_before(9)
    assert store.versions() == [4]


def test_too_little_room_is_said_before_it_runs_out(store: WeightStore, monkeypatch: pytest.MonkeyPatch):
    usage = type("usage", (), {"free": 3 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(RunError, match=r"needs 4 MiB for stage-0-00000\.safetensors, .* has 3 MiB left; .*--shm-size"):
        store.write(1, "stage-0", [("w", torch.ones(1 << 20))], KIB)


def test_the_folder_is_private_and_gone_after_close(tmp_path: Path):
    store = WeightStore.create(tmp_path)
    publish(store, 1, {"w": torch.ones(1)})
    for folder in (store.folder, store.folder / "00000001"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_the_store_of_a_killed_owner_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path):
    living = WeightStore.create(tmp_path)
    script = (
        "import pathlib, sys, time\n"
        "from megatron_bapo.weight_sync.transport import WeightStore\n"
        "print(WeightStore.create(pathlib.Path(sys.argv[1])).folder, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        abandoned = Path(owner.stdout.readline().strip())
        assert abandoned.is_dir()
        assert living.folder.is_dir()
        owner.send_signal(signal.SIGKILL)
    WeightStore.create(tmp_path).close()
    assert not abandoned.exists()
    assert living.folder.is_dir()
    living.close()
