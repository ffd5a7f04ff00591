import os
from pathlib import Path

import pytest

from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.trainer.checkpoint import checkpoints, save_checkpoint
from tests.unit.controller.test_training_loop import make_config, start


def test_complete_checkpoints_are_listed_oldest_first_and_partial_ones_are_not(tmp_path):
    for name in ("step-00000100", "step-00000020", "step-00000003.partial", "step-7", "other"):
        (tmp_path / name).mkdir()

    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000020", "step-00000100"]


def test_a_run_that_has_saved_nothing_has_no_checkpoints(tmp_path):
    assert checkpoints(tmp_path / "missing") == []


@pytest.mark.filterwarnings("ignore")
def test_the_name_of_a_checkpoint_is_on_disk_before_older_ones_are_deleted(
    tmp_path: Path, groups: ParallelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(make_config(tmp_path / "run"), groups, {}, [0, 1, 2]).worker
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    flushed: list[tuple[Path, list[str]]] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append((path, sorted(each.name for each in folder.iterdir())))

    monkeypatch.setattr(os, "fsync", record)
    save_checkpoint(worker, folder, 1, {}, keep=1)
    save_checkpoint(worker, folder, 2, {}, keep=1)
    assert (folder, ["step-00000001"]) in flushed
    assert flushed[-1] == (folder, ["step-00000001", "step-00000002"])
    assert [path.name for path in checkpoints(folder)] == ["step-00000002"]
