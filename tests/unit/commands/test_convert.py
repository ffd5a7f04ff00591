import json
from pathlib import Path

import pytest

from megatron_bapo.commands.convert import CheckpointSource, find_checkpoint
from megatron_bapo.config.loading import dump_config
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError


def hugging_face_folder(path: Path, **fields: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", **fields}))
    return path


def checkpoint(path: Path) -> Path:
    (path / "weights").mkdir(parents=True)
    (path / "state.json").write_text("{}")
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return the directory of a run that created its own model, moved since."""
    root = tmp_path / "run"
    hugging_face_folder(root / "initial_model")
    config = Config.model_validate(
        {
            "run_dir": tmp_path / "where it was",
            "model": {"create": {}, "dtype": "bfloat16"},
            "data": {"train": {"reasoning_gym": {"chain_sum": {}}, "size": 8}},
            "trainer": {"total_steps": 2, "train_batch_size": 16, "ppo_mini_batch_size": 8},
        }
    )
    (root / "config.yaml").write_text(dump_config(config))
    (root / "checkpoints" / "step-00000030.partial" / "weights").mkdir(parents=True)
    return root


def test_the_newest_checkpoint_of_a_run_is_found_with_its_model_and_dtype(run_dir):
    for number in (9, 20):
        checkpoint(run_dir / "checkpoints" / f"step-{number:08d}")

    newest, older = (run_dir / "checkpoints" / f"step-{number:08d}" for number in (20, 9))
    expected = CheckpointSource(newest, run_dir / "initial_model", "bfloat16")
    assert [find_checkpoint(path, None, None) for path in (run_dir, run_dir / "checkpoints", newest)] == [expected] * 3
    assert find_checkpoint(older, None, None).checkpoint == older


@pytest.mark.parametrize("name", ["lr: 1e-6", "run #2", "{a", 'ü "quoted"'])
def test_a_run_directory_may_have_any_name(run_dir: Path, name: str) -> None:
    renamed = run_dir.rename(run_dir.with_name(name))
    newest = checkpoint(renamed / "checkpoints" / "step-00000020")
    assert find_checkpoint(renamed, None, None) == CheckpointSource(newest, renamed / "initial_model", "bfloat16")


def test_given_origin_and_dtype_take_precedence_over_the_runs(run_dir, tmp_path):
    checkpoint(run_dir / "checkpoints" / "step-00000020")
    origin = hugging_face_folder(tmp_path / "base", dtype="float16")

    found = find_checkpoint(run_dir, origin, "float32")

    assert (found.origin, found.dtype) == (origin, "float32")
    assert find_checkpoint(run_dir, origin, None).dtype == "bfloat16"


@pytest.mark.parametrize(("fields", "dtype"), [({"torch_dtype": "bfloat16"}, "bfloat16"), ({}, "float32")])
def test_outside_a_run_the_dtype_is_that_of_the_origin(tmp_path, fields, dtype):
    alone, origin = checkpoint(tmp_path / "step-00000020"), hugging_face_folder(tmp_path / "base", **fields)

    assert find_checkpoint(alone, origin, None) == CheckpointSource(alone, origin, dtype)


def test_outside_a_run_the_origin_must_be_given(tmp_path):
    with pytest.raises(UserError, match=r"give the Hugging Face folder .* as --origin-hf-dir"):
        find_checkpoint(checkpoint(tmp_path / "step-00000020"), None, None)


def test_an_origin_without_a_config_is_named(run_dir, tmp_path):
    checkpoint(run_dir / "checkpoints" / "step-00000020")
    with pytest.raises(UserError, match=r"there is no .*elsewhere/config.json; give .* --origin-hf-dir"):
        find_checkpoint(run_dir, tmp_path / "elsewhere", None)


def test_the_message_about_a_wrong_folder_names_its_kind(run_dir, tmp_path):
    (tmp_path / "megatron" / "iter_0000100").mkdir(parents=True)
    (tmp_path / "megatron" / "iter_0000100" / "__0_0.distcp").touch()
    hugging_face_folder(tmp_path / "base")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    messages = {
        "run": "is a run directory without a complete checkpoint yet",
        "megatron": "has a checkpoint of Megatron-Core, .*iter_0000100, which tools/convert_megatron_to_hf.py makes",
        "base": "is already a Hugging Face folder",
        "empty": "contains no checkpoint of this trainer",
        "file": "is not a folder",
        "missing": "does not exist",
    }
    for name, message in messages.items():
        with pytest.raises(UserError, match=f"{name} {message}.*; give a run directory, or a checkpoint in it"):
            find_checkpoint(tmp_path / name, None, None)


def test_a_checkpoint_that_was_being_written_is_refused(tmp_path):
    with pytest.raises(UserError, match="may be incomplete"):
        find_checkpoint(checkpoint(tmp_path / "step-00000020.partial"), None, None)
