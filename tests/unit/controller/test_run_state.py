import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bapo.config.loading import dump_config
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.run_state import RunState, check_resumable
from megatron_bapo.errors import ProbeFailed, RunError, StorageFailed, UserError
from megatron_bapo.run_directory import RunDirectory
from tests.e2e.small_disk import fill, small_disk

LOCKING_PROCESS = """
import sys, time
from pathlib import Path
from megatron_bapo.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "runs" / "first")
    directory.create()
    return directory


def make_config(run_dir: Path, *, lr: float = 1e-6, total_steps: int = 2) -> Config:
    return Config.model_validate(
        {
            "run_dir": run_dir,
            "model": {"create": {}},
            "data": {"train": {"reasoning_gym": {"chain_sum": {}}, "size": 8}},
            "optimizer": {"lr": lr},
            "trainer": {"total_steps": total_steps, "train_batch_size": 16, "ppo_mini_batch_size": 8},
        }
    )


def test_a_state_is_unchanged_by_a_json_round_trip():
    state = RunState(warm_start_step=4, step=3, update=16, policy_version=17, data={"epoch": 1, "position": 5})

    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_further_fields_of_a_checkpoints_state_are_ignored():
    assert RunState.from_json({**RunState(step=2).to_json(), "adam_step": 9}) == RunState(step=2)


def test_a_directory_that_cannot_be_created_is_named_with_the_reason():
    with pytest.raises(UserError, match=r"run_dir=/dev/null/x cannot be written to \(Not a directory: /dev/null/x\); "):
        RunDirectory(Path("/dev/null/x")).create()


def test_a_directory_in_use_is_refused_until_the_other_process_has_ended(directory):
    with subprocess.Popen(
        [sys.executable, "-c", LOCKING_PROCESS, str(directory.root)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            with (
                pytest.raises(UserError, match=r"is in use by another run; .* run_dir=<another folder>"),
                directory.locked(),
            ):
                pass
        finally:
            process.kill()
    with directory.locked():
        assert process.returncode < 0


def test_the_lock_is_free_after_an_error_inside_it(directory):
    with pytest.raises(RunError), directory.locked():
        raise RunError("the engine died")
    with directory.locked():
        pass


def test_the_first_failure_is_kept(directory):
    directory.clear_failure()
    directory.record_failure(UserError("set model.dtype"))
    directory.record_failure(RunError("a peer went away"))

    assert json.loads(directory.failure.read_text()) == {"kind": "user", "message": "set model.dtype"}


def test_a_failed_probe_is_recorded_as_a_kind_that_is_not_restarted(directory):
    directory.clear_failure()
    directory.record_failure(ProbeFailed("engine 0 serves policy version 6"))

    assert json.loads(directory.failure.read_text())["kind"] == "probe"


def _fail_on_a_full_disk(directory: RunDirectory, partial: Path) -> None:
    with directory.reserved_space():
        directory.clear_failure()
        partial.mkdir()
        fill(partial.parent)
        with pytest.raises(OSError, match="No space left") as full:
            directory.metrics.write_text("a row")
        directory.record_failure(full.value)
        failure = json.loads(directory.failure.read_text())
        assert failure["kind"] == "storage"
        raise StorageFailed(failure["message"])


@pytest.mark.parametrize("name", ["checkpoints/step-00000004", "hf", "hf.old", "adapter", "reference"])
def test_the_reserved_space_suffices_to_report_a_full_disk(tmp_path, name):
    with small_disk(tmp_path / "disk", mib=4) as disk:
        directory = RunDirectory(disk / "run")
        directory.create()
        partial = directory.root / f"{name}.partial"
        with pytest.raises(StorageFailed, match=r"no checkpoint is complete\. Free space"):
            _fail_on_a_full_disk(directory, partial)
        assert not partial.exists()
        assert [path.name for path in directory.logs.iterdir()] == ["failure.json"]
        (disk / "log").write_text("-" * (1 << 19))


def _lose_an_engine(directory: RunDirectory, disk: Path) -> None:
    with directory.reserved_space():
        fill(disk)
        raise RunError("engine 0 died")


def test_a_full_disk_is_named_also_if_the_error_of_another_process_does_not_say_so(tmp_path):
    with small_disk(tmp_path / "disk", mib=4) as disk:
        directory = RunDirectory(disk / "run")
        directory.create()
        with pytest.raises(StorageFailed, match=r"No space left on device.*no checkpoint is complete"):
            _lose_an_engine(directory, disk)


def test_an_error_with_space_on_the_disk_is_unchanged(directory):
    directory.create()
    with pytest.raises(RunError, match=r"^engine 0 died$"), directory.reserved_space():
        raise RunError("engine 0 died")


def test_an_unexpected_error_is_recorded_with_its_type_and_the_log(directory):
    directory.clear_failure()
    directory.record_failure(KeyError("missing"))

    failure = json.loads(directory.failure.read_text())
    assert failure["kind"] == "run"
    assert "KeyError: 'missing'" in failure["message"]
    assert f"see its log in {directory.logs}" in failure["message"]


def started(directory: RunDirectory, *, checkpoint: bool = True) -> None:
    """Write the files of a run that was started with the default settings."""
    directory.config.write_text(dump_config(make_config(directory.root)))
    if checkpoint:
        (directory.checkpoints / "step-00000008").mkdir()
        write_state(directory)


def write_state(directory: RunDirectory, **changes: object) -> None:
    state = RunState(step=2, update=8).to_json() | {"adam_step": 8} | changes
    (directory.checkpoints / "step-00000008" / "state.json").write_text(json.dumps(state))


def test_a_run_continues_with_its_own_configuration_and_more_steps(directory):
    started(directory)

    check_resumable(make_config(directory.root, total_steps=50), directory)


def test_another_configuration_is_refused_with_both_values(directory):
    started(directory)

    with pytest.raises(UserError, match=r"optimizer\.lr: 1e-06 in the run directory, 0\.5 now"):
        check_resumable(make_config(directory.root, lr=0.5), directory)


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"step": "2"}, "step must be a whole number of at least 0"),
        ({"update": None, "adam_step": -1}, r"update must be .* of at least 0, adam_step must be a whole number"),
        ({"policy_version": True, "data": []}, "policy_version must be .*, data must be an object"),
    ],
)
def test_a_damaged_state_is_refused_with_every_rule_it_breaks(directory, changes, rules):
    started(directory)
    write_state(directory, **changes)

    with pytest.raises(UserError, match=rf"00008/state\.json is damaged: {rules}.*; delete .*step-00000008, and"):
        check_resumable(make_config(directory.root), directory)


def test_a_directory_without_a_checkpoint_accepts_any_configuration(directory):
    check_resumable(make_config(directory.root), directory)
    started(directory, checkpoint=False)

    check_resumable(make_config(directory.root, lr=0.5), directory)


def test_the_newest_checkpoint_is_the_complete_one_with_the_most_updates(directory):
    assert directory.newest_checkpoint is None
    for name in ("step-00000100", "step-00000020", "step-00000120.partial"):
        (directory.checkpoints / name).mkdir()

    assert directory.newest_checkpoint == directory.checkpoints / "step-00000100"
