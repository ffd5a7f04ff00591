import json
from pathlib import Path

import pytest

from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.preflight import check_inputs, check_writable, checked_prompts, read_inputs
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.rollout.tokenization import load_tokenizer

TASKS = {"reasoning_gym": {"chain_sum": {"min_terms": 2, "max_terms": 2}}, "size": 20}


def config(folder: Path, **values: object) -> Config:
    tree: dict[str, dict[str, object]] = {
        "model": {"create": {}, "dtype": "float32"},
        "data": {"max_prompt_length": 64, "chat_template": False, "train": TASKS},
        "reward": {"type": "reasoning_gym"},
        "rollout": {"n": 2, "max_response_length": 8},
        "trainer": {"total_steps": 2, "train_batch_size": 16, "ppo_mini_batch_size": 16},
    }
    for dotted, value in values.items():
        section, _, key = dotted.partition("__")
        tree.setdefault(section, {})[key] = value
    return Config.model_validate({"run_dir": folder / "run", **tree})


def from_file(folder: Path, *rows: object) -> dict[str, object]:
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return {"path": file}


def refusal(checked: Config, rollouts_from: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        check_inputs(checked, rollouts_from)
    return str(caught.value)


def test_inputs_that_are_all_right_pass_and_nothing_is_written(tmp_path: Path) -> None:
    environment = {"type": "function", "function": "megatron_bapo.environments.calculator:reply"}
    checked = config(tmp_path, environment__type="function", environment__function=environment["function"])
    assert check_inputs(checked) == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"data__train": {"reasoning_gym": {"nonsense": {}}, "size": 20}}, "nonsense"),
        ({"data__train": {**TASKS, "size": 7}}, "there are 7 training prompts, but a batch takes"),
        ({"data__max_prompt_length": 3}, "data.max_prompt_length allows 1 to 3"),
        ({"data__chat_template": True}, "the tokenizer has no chat template"),
        ({"reward__type": "function", "reward__function": "nowhere:f"}, "there is no module 'nowhere'"),
        ({"environment__type": "function", "environment__function": "json:no"}, "json has no 'no'"),
        (
            {"environment__max_turns": 2, "warm_start__num_steps": 1, "warm_start__demonstration": "json:no"},
            "json has no 'no'",
        ),
        (
            {"algorithm__objective": "function", "algorithm__function": "tests.user_functions:loss"},
            "algorithm.function=tests.user_functions:loss returned a tensor [] of torch.float32; return",
        ),
        (
            {"algorithm__adv_estimator": "function", "algorithm__adv_function": "tests.user_functions:of_groups"},
            "algorithm.adv_function=tests.user_functions:of_groups returned a tensor [4] of torch.float64; return",
        ),
    ],
    ids=str,
)
def test_an_input_that_is_of_no_use_is_named(tmp_path: Path, values: dict[str, object], expected: str) -> None:
    assert expected in refusal(config(tmp_path, **values))


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    train = from_file(tmp_path, *[{"prompt": str(i), "answer": "1"} for i in range(8)], "{")
    assert "prompts.jsonl:9" in refusal(config(tmp_path, data__train=train, reward__type="math_verify"))


@pytest.mark.parametrize(("num_bad", "is_refused"), [(3, False), (4, True)])
def test_more_useless_ground_truths_than_a_batch_may_lose_are_refused(
    tmp_path: Path, num_bad: int, is_refused: bool
) -> None:
    answers = [" "] * num_bad + ["4"] * (8 - num_bad)
    train = from_file(tmp_path, *[{"prompt": f"{i}?", "answer": answer} for i, answer in enumerate(answers)])
    checked = config(tmp_path, data__train=train, reward__type="math_verify")
    if is_refused:
        assert "reward.type=math_verify cannot read 4 of 8 ground truths" in refusal(checked)
    else:
        check_inputs(checked)


def test_a_chat_template_without_a_place_for_replies_is_refused_only_with_an_environment(tmp_path: Path) -> None:
    """A base model's template may end turns with another token than the end-of-sequence token."""
    model = tmp_path / "model"
    create_checkpoint(model, CreateModelConfig(), ["1"], seed=0)
    template = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    values = {"model__create": None, "model__path": model, "data__chat_template": True, "data__max_prompt_length": 99}
    check_inputs(config(tmp_path, **values))
    found = refusal(config(tmp_path, **values, environment__type="calculator"))
    assert "the chat template must render a turn, its end" in found
    assert "Set environment.role to the role that it supports" in found


def test_a_run_directory_that_cannot_be_made_is_refused_before_prompts_are_read(tmp_path: Path) -> None:
    checked = config(Path("/dev/null"), data__train={"path": tmp_path / "none.jsonl"}, reward__type="math_verify")
    with pytest.raises(UserError, match=r"run_dir=/dev/null/run cannot be written to \(Not a directory: /dev/null\)"):
        checked_prompts(checked)


def test_a_run_directory_in_a_folder_that_takes_no_folders_is_refused() -> None:
    """The permissions of /proc let root write there."""
    with pytest.raises(UserError, match=r"run_dir=/proc/run cannot be written to \(.*: /proc\)"):
        check_writable(Path("/proc/run"))


def test_a_folder_without_rollouts_is_refused_and_no_reward_is_imported_for_it(tmp_path: Path) -> None:
    checked = config(tmp_path, reward__type="function", reward__function="nowhere:f")
    assert "holds no step-*.parquet" in refusal(checked, tmp_path / "nonexistent")
    assert "is the run's own folder" in refusal(checked, tmp_path / "run" / "rollouts")


def test_a_teacher_with_the_policys_tokens_passes_and_one_with_others_is_refused(tmp_path: Path) -> None:
    """A created model has a token for the common beginning of its prompts."""
    beginning = "State the final answer to the following arithmetic problem: "  # of chain_sum's prompts
    for name, start in (("same", beginning), ("other", "Question: ")):
        create_checkpoint(tmp_path / name, CreateModelConfig(), [f"{start}{number}" for number in range(9)], seed=0)
    distillation = {"teacher": tmp_path / "same"}
    checked = config(tmp_path, algorithm__objective="distill", algorithm__distillation=distillation)
    assert read_inputs(checked).tokenizer.get_vocab() == load_tokenizer(tmp_path / "same").get_vocab()
    message = refusal(config(tmp_path, algorithm__distillation={"teacher": tmp_path / "other"}))
    assert f"algorithm.distillation.teacher={tmp_path / 'other'} has another tokenizer than the policy: 1 " in message
    assert f"the first is {beginning!r} with the number 256 (the teacher's: none)" in message
    assert "choose a teacher with the policy's tokenizer" in message
