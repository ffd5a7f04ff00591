import json
from pathlib import Path

import pytest

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.prompt_sets import load_task_prompts
from megatron_bapo.errors import UserError


def write(path: Path, questions: str, *, broken: int = 0) -> Path:
    rows = [json.dumps({"prompt": question, "answer": question.upper()}) for question in questions]
    path.write_text("\n".join([*rows, *["{"] * broken]) + "\n")
    return path


def config(train: Path, validation: Path | None = None, **data: object) -> Config:
    """Return a configuration with batches of two prompts."""
    held_out = {} if validation is None else {"validation": {"path": validation}}
    return Config.model_validate(
        {
            "run_dir": train.parent / "run",
            "model": {"create": {}},
            "data": {"train": {"path": train, "on_bad_line": "skip"}, **held_out, **data},
            "rollout": {"n": 4},
            "trainer": {"total_steps": 1, "train_batch_size": 8, "ppo_mini_batch_size": 8},
        }
    )


def test_held_out_prompts_are_left_out_of_training_and_reported(tmp_path):
    loaded = load_task_prompts(config(write(tmp_path / "train.jsonl", "abcd"), write(tmp_path / "test.jsonl", "bdx")))

    assert [prompt.ground_truth for prompt in loaded.train] == ["A", "C"]
    assert [prompt.ground_truth for prompt in loaded.validation] == ["B", "D", "X"]
    assert loaded.notes == ("2 training prompts are also held out; they are left out of training",)


def test_a_shared_system_prompt_does_not_hide_held_out_prompts(tmp_path):
    files = write(tmp_path / "train.jsonl", "abc"), write(tmp_path / "test.jsonl", "a")

    loaded = load_task_prompts(config(*files, system_prompt="Be brief."))

    assert [prompt.messages[1]["content"] for prompt in loaded.train] == ["b", "c"]


def test_without_held_out_prompts_everything_is_for_training(tmp_path):
    loaded = load_task_prompts(config(write(tmp_path / "train.jsonl", "abc")))

    assert [prompt.ground_truth for prompt in loaded.train] == ["A", "B", "C"]
    assert loaded.validation == []
    assert loaded.notes == ()


def test_too_few_prompts_for_a_batch_are_refused_with_the_number_needed(tmp_path):
    files = write(tmp_path / "train.jsonl", "ab"), write(tmp_path / "test.jsonl", "a")

    with pytest.raises(UserError, match=r"there are 1 training prompts, but a batch takes .* = 2"):
        load_task_prompts(config(*files))


def test_skipped_lines_are_counted_with_the_first_reason(tmp_path):
    (note,) = load_task_prompts(config(write(tmp_path / "train.jsonl", "abc", broken=2))).notes

    assert note.startswith("data.train: 2 malformed lines skipped, first: ")
    assert "train.jsonl:4" in note
