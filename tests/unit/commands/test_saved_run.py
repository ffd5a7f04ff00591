import json
from pathlib import Path

from megatron_bapo.commands.saved_run import saved_run
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.run_state import RunState


def config(folder: Path, **sections: dict[str, object]) -> Config:
    return Config.model_validate(
        {
            "run_dir": folder / "run",
            "model": {"create": {}},
            "data": {"train": {"path": "p.jsonl"}},
            "trainer": {"total_steps": 170, "train_batch_size": 8, "ppo_mini_batch_size": 8},
            **sections,
        }
    )


def saved(of: Config, **state: int) -> Config:
    """The configuration, after writing a checkpoint's state to its run directory."""
    checkpoint = of.run_dir / "checkpoints" / f"step-{state.get('update', 0):08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(RunState(**state).to_json()))
    return of


def test_a_run_directory_that_does_not_exist_holds_no_run(tmp_path: Path) -> None:
    assert saved_run(config(tmp_path)) is None
    assert saved_run(config(tmp_path), rollout_only=True) is None


def test_a_run_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    checked = config(tmp_path)
    checked.run_dir.mkdir()
    (checked.run_dir / "config.yaml").touch()
    assert (
        saved_run(checked) == f"{checked.run_dir} holds a run without a checkpoint; train starts it from the beginning"
    )


def test_an_interrupted_run_continues_after_its_last_saved_step(tmp_path: Path) -> None:
    checked = saved(config(tmp_path), step=40, update=345)
    assert str(saved_run(checked)).endswith(
        "run was interrupted; train continues after step 40 of 170 (checkpoint step-00000345)"
    )


def test_a_run_that_was_interrupted_in_its_warm_start_continues_there(tmp_path: Path) -> None:
    checked = saved(config(tmp_path, warm_start={"num_steps": 185}), warm_start_step=100, update=100)
    assert "train continues after 100 of 185 supervised updates" in str(saved_run(checked))


def test_a_finished_run_says_so_and_that_it_can_be_extended(tmp_path: Path) -> None:
    checked = saved(config(tmp_path), step=170, update=170)
    said = str(saved_run(checked))
    assert "is finished (170 of 170 steps); train would only evaluate" in said
    assert said.endswith("or raise trainer.total_steps to train longer")


def test_a_finished_run_whose_schedule_ended_with_it_is_not_said_to_be_extensible(tmp_path: Path) -> None:
    checked = saved(config(tmp_path, optimizer={"lr_decay_style": "cosine"}), step=170, update=170)
    said = str(saved_run(checked))
    assert "is finished (170 of 170 steps)" in said
    assert "total_steps" not in said


def test_rollouts_continue_after_the_last_batch_or_are_finished(tmp_path: Path) -> None:
    checked = config(tmp_path)
    folder = checked.run_dir / "rollouts"
    folder.mkdir(parents=True)
    (folder / "step-00000003.parquet").touch()
    assert "train --rollout-only continues after batch 3 of 170" in str(saved_run(checked, rollout_only=True))
    (folder / "step-00000170.parquet").touch()
    assert "is finished (170 of 170 rollout batches)" in str(saved_run(checked, rollout_only=True))
