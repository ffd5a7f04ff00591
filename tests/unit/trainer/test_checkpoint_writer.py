from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest

from megatron_bapo.errors import StorageFailed
from megatron_bapo.metrics.values import scalars
from megatron_bapo.parallel.groups import ParallelGroups
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.trainer.checkpoint import checkpoints
from megatron_bapo.trainer.checkpoint_writer import CheckpointWriter
from megatron_bapo.trainer.worker import Worker
from tests.e2e.small_disk import fill, free, small_disk
from tests.unit.controller.test_training_loop import make_config, start

# Megatron-Core warns about its own defaults and calls.
pytestmark = pytest.mark.filterwarnings("ignore")


class SlowRollouts:
    """Rollouts whose files are complete when a test says so."""

    def __init__(self, folder: Path) -> None:
        self.may_finish = Event()
        self._folder = folder
        self.complete_at_begin: list[list[str]] = []
        """The complete checkpoints at the begin of each save."""

    def begin_saving(self, folder: Path) -> dict[str, Any]:
        self.complete_at_begin.append([path.name for path in checkpoints(self._folder)])
        return {"number": len(self.complete_at_begin)}

    def finish_saving(self) -> None:
        assert self.may_finish.wait(60.0), "nobody lets the files be complete"


@pytest.fixture
def worker(tmp_path: Path, groups: ParallelGroups) -> Worker:
    return start(make_config(tmp_path / "run"), groups, {}, [0, 1, 2]).worker


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def finishing_soon(rollouts: SlowRollouts) -> Iterator[None]:
    """Let the rollouts' files become complete while the block waits for them."""
    releasing = Timer(0.2, rollouts.may_finish.set)
    releasing.start()
    yield
    releasing.join()


def test_a_save_returns_before_the_files_are_written_and_the_checkpoint_is_not_visible_until_then(
    worker: Worker, tmp_path: Path
) -> None:
    rollouts = SlowRollouts(tmp_path)
    writer = CheckpointWriter(worker, tmp_path / "checkpoints", rollouts)
    writer.save(1, {})
    writer.check()
    assert names(tmp_path / "checkpoints") == ["step-00000001.partial"]
    assert set(writer.metrics()) == {"checkpoint/blocked_s", "checkpoint/wait_s"}
    rollouts.may_finish.set()
    writer.finish()
    assert names(tmp_path / "checkpoints") == ["step-00000001"]
    assert scalars(writer.metrics())["checkpoint/write_s"] > 0.0
    assert writer.metrics() == {}


def test_a_second_save_waits_until_the_first_is_complete_and_says_for_how_long(worker: Worker, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    rollouts = SlowRollouts(folder)
    writer = CheckpointWriter(worker, folder, rollouts)
    writer.save(1, {})
    with finishing_soon(rollouts):
        writer.save(2, {})
        writer.finish()
    assert rollouts.complete_at_begin == [[], ["step-00000001"]]
    seconds = scalars(writer.metrics())
    assert 0.0 < seconds["checkpoint/wait_s"] <= seconds["checkpoint/blocked_s"]
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_a_run_that_fails_finishes_the_write_that_is_under_way(worker: Worker, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    rollouts = SlowRollouts(folder)
    writer = CheckpointWriter(worker, folder, rollouts)
    writer.save(1, {})
    with finishing_soon(rollouts):
        writer.close()
    assert names(folder) == ["step-00000001"]


def test_a_checkpoint_of_the_same_update_is_not_written_twice(worker: Worker, tmp_path: Path) -> None:
    rollouts = SlowRollouts(tmp_path)
    rollouts.may_finish.set()
    writer = CheckpointWriter(worker, tmp_path / "checkpoints", rollouts)
    writer.save(1, {})
    writer.save(1, {})
    writer.finish()
    assert len(rollouts.complete_at_begin) == 1


def test_a_full_disk_is_told_at_the_next_step_with_the_message_of_a_run(worker: Worker, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", mib=4) as disk:
        directory = RunDirectory(disk / "run")
        directory.create()
        rollouts = SlowRollouts(directory.checkpoints)
        rollouts.may_finish.set()
        writer = CheckpointWriter(worker, directory.checkpoints, rollouts)
        writer.save(1, {})
        writer.finish()
        directory.clear_failure()
        rollouts.may_finish.clear()
        writer.save(2, {"ballast": "-" * (1 << 20)})
        fill(disk)
        rollouts.may_finish.set()
        with pytest.raises(StorageFailed, match=rf"No space left on device.*{directory.root} has 0 MiB free") as full:
            writer.finish()
        with pytest.raises(StorageFailed):
            writer.check()
        directory.record_failure(full.value)
        assert '"kind": "storage"' in directory.failure.read_text()
        assert [path.name for path in checkpoints(directory.checkpoints)] == ["step-00000001"]
        free(disk)
        writer = CheckpointWriter(worker, directory.checkpoints, rollouts)
        writer.save(2, {})
        writer.finish()
        assert names(directory.checkpoints) == ["step-00000001", "step-00000002"]
