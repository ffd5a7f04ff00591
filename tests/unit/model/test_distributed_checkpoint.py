"""Folders that PyTorch's own `torch.distributed.checkpoint` writes, whole, damaged and malicious."""

import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_bapo.errors import UserError
from megatron_bapo.model.distributed_checkpoint import METADATA, DistributedCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TENSORS = {
    "stacked": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
    "plain": torch.arange(6.0).reshape(3, 2),
    "scalar": torch.tensor(5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    torch_checkpoint.save({**TENSORS, "arguments": {"seed": 3}}, checkpoint_id=path, no_dist=True)
    return path


def change_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def test_whole_tensors_and_their_parts_are_read(folder):
    checkpoint = DistributedCheckpoint(folder)

    assert checkpoint.shapes() == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.tensor(name).read(), tensor)
        assert checkpoint.tensor(name).read().dtype == tensor.dtype
    assert torch.equal(checkpoint.tensor("stacked", 1).read((1,)), TENSORS["stacked"][1])
    assert torch.equal(checkpoint.tensor("stacked", 2).read((0, 2)), TENSORS["stacked"][0, 2])


def test_a_part_of_several_stacked_tensors_is_read_once(folder, monkeypatch):
    checkpoint, load, num_loads = DistributedCheckpoint(folder), torch.load, 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_loads
        num_loads += 1
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", counted)
    stacked = checkpoint.tensor("stacked", 2)
    for index in itertools.product(range(2), range(3)):
        assert torch.equal(stacked.read(index), TENSORS["stacked"][index])
    assert num_loads == 1


class Command:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.path}",)


def test_nothing_in_the_metadata_is_run(folder, tmp_path):
    def add_command(metadata: Any) -> None:
        metadata.planner_data = Command(tmp_path / "run")

    change_metadata(folder, add_command)

    assert torch.equal(DistributedCheckpoint(folder).tensor("plain").read(), TENSORS["plain"])
    assert not (tmp_path / "run").exists()
    pickle.loads((folder / METADATA).read_bytes())
    assert (tmp_path / "run").exists(), "the command would have been run by pickle"


def test_nothing_in_a_part_is_run(folder, tmp_path):
    (file,) = folder.glob("*.distcp")
    command = pickle.dumps(Command(tmp_path / "run"), protocol=2)

    def point_to_command(metadata: Any) -> None:
        for index, stored in metadata.storage_data.items():
            if index.fqn == "plain":
                stored.offset, stored.length = file.stat().st_size, len(command)

    change_metadata(folder, point_to_command)
    with file.open("ab") as data:
        data.write(command)

    with pytest.raises(UserError, match="a part of plain cannot be read"):
        DistributedCheckpoint(folder).tensor("plain").read()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"no pickle",
        pickle.dumps(3),
        pickle.dumps({"state_dict_metadata": {}}),
        b"\x80\x04\x95",
        pytest.param(b"\x80\x04})" + b"\x85" * 2_000_000 + b"Ns.", id="a key that is a deeply nested tuple"),
    ],
)
def test_metadata_of_another_format_is_refused(folder, content):
    (folder / METADATA).write_bytes(content)
    with pytest.raises(UserError, match=r"\.metadata cannot be read .*; copy the checkpoint again"):
        DistributedCheckpoint(folder)


def test_metadata_that_is_cut_anywhere_is_refused(folder):
    whole = (folder / METADATA).read_bytes()
    for size in range(0, len(whole), 7):
        (folder / METADATA).write_bytes(whole[:size])
        with pytest.raises(UserError, match="cannot be read"):
            DistributedCheckpoint(folder)


def test_a_part_that_is_cut_is_named(folder):
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    for name in TENSORS:
        with pytest.raises(UserError, match=f"{file.name}: a part of {name} cannot be read"):
            DistributedCheckpoint(folder).tensor(name).read()
    file.unlink()
    with pytest.raises(UserError, match="No such file"):
        DistributedCheckpoint(folder).tensor("plain").read()


@pytest.mark.parametrize(
    "fields",
    [
        {"length": -5},
        {"length": 2**62},
        {"length": 10**30},
        {"offset": -1},
        {"offset": 10**30},
        {"relative_path": "a\0b"},
        {"relative_path": ".."},
    ],
)
def test_a_part_at_an_impossible_place_is_refused(folder, fields):
    def move(metadata: Any) -> None:
        for index, stored in metadata.storage_data.items():
            if index.fqn == "plain":
                for name, value in fields.items():
                    setattr(stored, name, value)

    change_metadata(folder, move)
    with pytest.raises(UserError, match="a part of plain cannot be read"):
        DistributedCheckpoint(folder).tensor("plain").read()


@pytest.mark.parametrize("content", [b"\x80\x02X\x02\x00\x00\x00\xff\xff.", b"\x80\x02h\x05.", b"\x80\x02K\x01)R."])
def test_a_part_that_is_no_tensor_is_refused(folder, content):
    (file,) = folder.glob("*.distcp")
    file.write_bytes(content + b"." * file.stat().st_size)
    with pytest.raises(UserError, match="a part of scalar cannot be read"):
        DistributedCheckpoint(folder).tensor("scalar").read()


def test_parts_that_overlap_and_leave_a_hole_are_refused(folder):
    def overlap(metadata: Any) -> None:
        (first,) = [index for index in metadata.storage_data if index.fqn == "plain"]
        stored = metadata.storage_data.pop(first)
        chunks = metadata.state_dict_metadata["plain"].chunks
        chunks.clear()
        for number, (offsets, sizes) in enumerate([((0, 0), (2, 2)), ((0, 1), (2, 1))]):
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            metadata.storage_data[MetadataIndex("plain", torch.Size(offsets), number)] = stored

    change_metadata(folder, overlap)
    with pytest.raises(UserError, match="the 6 values of plain"):
        DistributedCheckpoint(folder).tensor("plain").read()


def test_a_part_that_is_missing_is_counted(folder):
    def remove(metadata: Any) -> None:
        for index in [index for index in metadata.storage_data if index.fqn == "stacked"]:
            del metadata.storage_data[index]

    change_metadata(folder, remove)
    with pytest.raises(UserError, match=r"has 0 of the 12 values of stacked\[0\]"):
        DistributedCheckpoint(folder).tensor("stacked", 1)


def test_files_outside_of_the_folder_are_not_read(folder):
    def point_outside(metadata: Any) -> None:
        for stored in metadata.storage_data.values():
            stored.relative_path = "../" + stored.relative_path

    change_metadata(folder, point_outside)
    with pytest.raises(UserError, match="is not a file of the folder"):
        DistributedCheckpoint(folder).tensor("plain")
