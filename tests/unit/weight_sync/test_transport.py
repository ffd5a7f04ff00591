import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync import transport
from megatron_bapo.weight_sync.plan import WeightPlan
from megatron_bapo.weight_sync.transport import SPARE, WeightStore
from tests.unit.weight_sync.examples import BUCKET_BYTES, halves, numbered, publish, reading, whole_tensors

KIB = 1024
SHAPES = {"w": (64, 64), "v": (32, 32)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[WeightStore]:
    store = WeightStore.create(tmp_path)
    yield store
    store.close()


def weight_files(store: WeightStore) -> list[Path]:
    return sorted(store.folder.rglob("*.safetensors"))


def random(shapes: dict[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_written_is_read_bit_for_bit_and_any_tool_can_read_it(store: WeightStore, dtype: torch.dtype):
    shapes = {"z": (3, 5), "a": (), "larger_than_a_bucket": (40, 64), "m": (7,)}
    tensors = random(shapes, dtype=dtype)
    publish(store, 3, tensors, bucket_bytes=KIB)
    (file,) = weight_files(store)
    for read in (dict(store.read(3)), load_file(file)):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == dtype
            assert read[name].shape == tensor.shape
            assert bits(read[name]).equal(bits(tensor))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("reader_dim", [0, 1])
def test_several_ranks_fill_one_tensor_and_each_reader_verifies_only_its_half(
    store: WeightStore, dim: int, reader_dim: int
):
    tensors = random({"w": (8, 6), "v": (4, 10)})
    plan = halves({name: tuple(tensor.shape) for name, tensor in tensors.items()}, dim=dim, reader_dim=reader_dim)
    written = [store.write(1, plan, rank, reading(tensors)) for rank in (1, 0)]
    store.commit(1, plan)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert written == [total // 2] * 2
    assert [store.verify(1, reader) for reader in (0, 1)] == [total // 2] * 2
    assert store.verify(1) == total
    assert all(tensor.equal(tensors[name]) for name, tensor in store.read(1))
    content = load_file(weight_files(store)[0])
    content["w"].narrow(reader_dim, 0, 2).fill_(7.0)  # in the half of reader 0
    _overwrite(weight_files(store)[0], content)
    assert store.verify(1, 1) == total // 2
    with pytest.raises(RunError, match=r"is damaged: bucket \d"):
        store.verify(1, 0)


def _overwrite(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Overwrite only the bytes of the tensors and keep the header."""
    data = file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    content = bytearray(data)
    for name, tensor in tensors.items():
        start, stop = header[name]["data_offsets"]
        content[size + start : size + stop] = bits(tensor).numpy().tobytes()
    file.write_bytes(content)


def test_views_of_one_buffer_and_transposed_views_are_written(store: WeightStore):
    buffer = torch.nn.Parameter(torch.arange(12.0))
    publish(store, 1, {"head": buffer[:4], "tail": buffer[4:], "transposed": torch.arange(6.0).view(2, 3).t()})
    read = dict(store.read(1))
    assert read["tail"].equal(buffer[4:].detach())
    assert read["transposed"].equal(torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_the_tensors_of_a_module_are_read_together(store: WeightStore):
    names = ["layers.0.q", "layers.1.q", "layers.0.k", "layers.1.k"]
    publish(store, 1, {name: torch.ones(2) for name in names})
    assert [name for name, _ in store.read(1)] == sorted(names)


@pytest.mark.parametrize("version", [6, 7])
def test_versions_must_increase(store: WeightStore, version: int):
    tensors = {"w": torch.ones(1)}
    plan = publish(store, 7, tensors)
    with pytest.raises(RunError, match=f"version {version} is stale: the store already has 7"):
        store.write(version, plan, 0, reading(tensors))
    with pytest.raises(RunError, match=f"version {version} is stale"):
        store.commit(version, plan)
    assert dict(store.read(7))["w"].item() == 1


@pytest.mark.parametrize(
    "damage", [lambda file: os.truncate(file, 50), Path.unlink, lambda file: file.write_bytes(b"")],
    ids=["truncated", "deleted", "emptied"],
)  # fmt: skip
def test_a_truncated_or_deleted_file_is_found(store: WeightStore, damage):
    publish(store, 1, {"w": torch.ones(100)})
    damage(weight_files(store)[0])
    with pytest.raises(RunError, match=r"version 1 in .* is damaged"):
        store.verify(1)


def test_a_flipped_bit_is_found_and_the_bucket_is_named(store: WeightStore):
    publish(store, 1, {"v": torch.ones(100), "w": torch.ones(100)}, bucket_bytes=400)
    (file,) = weight_files(store)
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)
    expected = store.manifest(1).checksums[1]
    with pytest.raises(RunError, match=rf"damaged: bucket 1 \(w, ...\): expected {expected}, found \w+"):
        store.verify(1)


def test_a_commit_without_all_writers_names_those_that_are_missing(store: WeightStore):
    tensors = random({"w": (4, 4)})
    plan = halves({"w": (4, 4)}, dim=0, reader_dim=0)
    store.write(1, plan, 0, reading(tensors))
    with pytest.raises(RunError, match="buckets are missing from trainer rank 1;"):
        store.commit(1, plan)
    assert store.versions() == []


def test_buckets_of_the_same_version_under_another_layout_are_ignored(store: WeightStore):
    """Restart a trainer that was killed during a write with another layout, and publish the same version again."""
    old, new = random({"w": (4, 4)}, seed=1), random({"w": (4, 4)}, seed=2)
    before = halves({"w": (4, 4)}, dim=0, reader_dim=0)
    for rank in (0, 1):
        store.write(1, before, rank, reading(old))
    after = whole_tensors(new)
    with pytest.raises(RunError, match="buckets are missing from trainer rank 0;"):
        store.commit(1, after)
    store.write(1, after, 0, reading(new))
    store.commit(1, after)
    store.verify(1)
    assert dict(store.read(1))["w"].equal(new["w"])


def test_an_uncommitted_version_cannot_be_read(store: WeightStore):
    tensors = {"w": torch.ones(1)}
    store.write(2, whole_tensors(tensors), 0, reading(tensors))
    with pytest.raises(RunError, match="version 2 is not committed"):
        store.verify(2)
    with pytest.raises(RunError, match="version 2 is not committed"):
        next(store.read(2))


def test_a_write_that_fails_halfway_is_incomplete_even_after_a_complete_one(store: WeightStore):
    tensors = {"a": torch.zeros(400), "b": torch.zeros(400)}
    plan = whole_tensors(tensors, KIB)

    def failing(part):
        if part.name == "b":
            raise KeyboardInterrupt
        return tensors["a"][part.box.start[0] : part.box.stop[0]]

    store.write(1, plan, 0, reading(tensors))
    with pytest.raises(KeyboardInterrupt):
        store.write(1, plan, 0, failing)
    with pytest.raises(RunError, match="buckets are missing from trainer rank 0"):
        store.commit(1, plan)


def test_a_manifest_that_was_cut_short_is_not_a_version(store: WeightStore):
    tensors = {"w": torch.ones(1)}
    plan = whole_tensors(tensors)
    store.write(1, plan, 0, reading(tensors))
    (store.folder / "00000001" / "COMMITTED.1.partial").write_text(json.dumps({"version": 1})[:5])
    assert store.versions() == []
    store.commit(1, plan)
    assert store.versions() == [1]


def test_older_versions_are_discarded_including_unfinished_ones(store: WeightStore):
    tensors = {"w": torch.zeros(1)}
    store.write(0, whole_tensors(tensors), 0, reading(tensors))
    for version in (1, 2, 4):
        publish(store, version, {"w": torch.full((100,), float(version))})
    store.discard_before(4)
    assert store.versions() == [4]
    assert sorted(path.name for path in store.folder.iterdir() if path.is_dir()) == ["00000004"]


def test_temporary_folders_of_others_are_left_alone(store: WeightStore):
    """Create a temporary folder such as those that vLLM's processes and their imports put into the store."""
    other = store.folder / "tmph3v8jtk1wandb-artifacts"
    for version in (1, 2, 3):
        publish(store, version, {"w": torch.full((100,), float(version))})
        other.mkdir(exist_ok=True)
        store.discard_before(version)
    assert store.versions() == [3]
    assert other.is_dir()


def test_versions_alternate_between_two_files(store: WeightStore):
    inodes = []
    for version in range(1, 7):
        publish(store, version, {"w": torch.full((100,), float(version))})
        inodes.append((store.folder / f"{version:08d}" / "weights.safetensors").stat().st_ino)
        store.discard_before(version)
        assert len(weight_files(store)) <= 2
        store.verify(version)
        assert dict(store.read(version))["w"].equal(torch.full((100,), float(version)))
    assert inodes == inodes[:2] * 3


def test_the_file_of_an_unfinished_version_is_reused_by_the_next_one(store: WeightStore):
    tensors = random({"w": (10, 10)})
    publish(store, 1, tensors)
    for version in range(2, 5):
        store.write(version, whole_tensors(tensors), 0, reading(tensors))
    assert len(weight_files(store)) == 2
    publish(store, 5, tensors)
    store.verify(5)
    assert len(weight_files(store)) == 2


def test_a_model_of_another_size_gets_a_new_file(store: WeightStore):
    for version, size in enumerate([100, 100, 100, 50, 200], start=1):
        publish(store, version, {"w": torch.full((size,), float(version))})
        store.discard_before(version)
        assert store.verify(version) == 4 * size
        assert len(weight_files(store)) <= 2


def test_the_newest_version_is_never_discarded(store: WeightStore):
    publish(store, 4, {"w": torch.ones(1)})
    store.discard_before(9)
    assert store.versions() == [4]


def test_insufficient_memory_is_reported_and_leaves_no_files(store: WeightStore, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tensors = {"w": torch.ones(1 << 20)}
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(RunError, match=r"needs 4 MiB for policy version 1, .* MiB left \(No space.*--shm-size"):
        store.write(1, whole_tensors(tensors), 0, reading(tensors))
    assert list(store.folder.rglob("weights*")) == []


def test_the_folder_is_private_and_gone_after_close(tmp_path: Path):
    store = WeightStore.create(tmp_path)
    publish(store, 1, {"w": torch.ones(1)})
    for folder in (store.folder, store.folder / "00000001"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_systemd_has_removed_is_named_with_the_setting_that_keeps_it(store: WeightStore):
    publish(store, 1, random(SHAPES))
    shutil.rmtree(store.folder)
    with pytest.raises(RunError, match=f"{store.folder} .* was removed while the run used it.*RemoveIPC=no"):
        publish(store, 2, random(SHAPES))


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


def fails(*_: object) -> None:
    raise OSError("killed")


def prepare(store: WeightStore, version: int) -> None:
    store.discard_before(version)
    store.prepare(version)


def base_of_next(store: WeightStore, version: int, plan: WeightPlan) -> int | None:
    with store.bucket_writer(version, plan, 0, "rank-0") as writer:
        return writer.base


def test_the_next_versions_file_has_the_bytes_of_the_prepared_version_once(store: WeightStore):
    tensors = {1: numbered(SHAPES, 1), 2: numbered(SHAPES, 2)}
    for version in (1, 2):
        plan = publish(store, version, tensors[version])
    assert not (store.folder / SPARE).exists()
    prepare(store, 2)
    prepare(store, 2)
    assert base_of_next(store, 3, plan) == 2
    assert all(store.open(3).tensor(name).equal(tensor) for name, tensor in tensors[2].items())
    assert base_of_next(store, 3, plan) is None  # its first writer may have written something


def test_a_spare_file_is_not_taken_for_prepared_after_a_failure_or_a_discarded_version(
    store: WeightStore, monkeypatch: pytest.MonkeyPatch
):
    for version in (1, 2):
        plan = publish(store, version, numbered(SHAPES, version))
    with monkeypatch.context() as failing:
        failing.setattr(transport, "in_threads", fails)
        with pytest.raises(OSError, match="killed"):
            prepare(store, 2)
    assert base_of_next(store, 3, plan) is None
    publish(store, 4, numbered(SHAPES, 4))
    prepare(store, 4)
    assert base_of_next(store, 5, plan) == 4
    publish(store, 6, numbered(SHAPES, 6))
    prepare(store, 6)
    publish(store, 7, numbered(SHAPES, 7))
    store.discard_before(7)
    assert base_of_next(store, 8, plan) is None


def test_the_first_version_and_that_of_another_plan_prepare_nothing(store: WeightStore):
    plan = publish(store, 1, numbered(SHAPES, 1))
    prepare(store, 1)
    assert not (store.folder / SPARE).exists()
    publish(store, 2, numbered(SHAPES, 2))
    prepare(store, 2)
    other = whole_tensors(numbered(SHAPES, 3), BUCKET_BYTES // 4)
    assert other.digest != plan.digest
    assert base_of_next(store, 3, other) is None
