import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.data.choices import LETTERS, lettered
from megatron_bapo.data.prompts import PromptSet, load_prompts
from megatron_bapo.errors import UserError
from megatron_bapo.rewards.math_answer import compute_score

PLANETS = ["Mars", "Venus", "Earth"]
COLUMNS = ["Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"]


def load(path: Path, **keys: Any) -> PromptSet:
    return load_prompts(PromptSourceConfig(path=path, **keys), name="train", system_prompt=None)


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("right", ["B", " B", "Venus", 1], ids=repr)
def test_choices_are_lettered_lines_of_the_prompt_and_the_ground_truth_is_a_letter(right: str | int) -> None:
    text, letter = lettered("Which planet is the hottest?\n", PLANETS, right, shuffled=False)
    assert text == "Which planet is the hottest?\n\nA. Mars\nB. Venus\nC. Earth"
    assert letter == "B"


def test_the_default_reward_reads_every_letter() -> None:
    choices = [f"choice {number}" for number in range(len(LETTERS))]
    for number, letter in enumerate(LETTERS):
        assert lettered("?", choices, number, shuffled=False)[1] == letter
        assert compute_score("", f"\\boxed{{{letter}. {choices[number]}}}", letter)["score"] == 1.0


def test_the_second_of_two_equal_choices_can_be_right() -> None:
    assert lettered("?", ["yes", "no", "yes"], "C", shuffled=False)[1] == "C"


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.parquet"])
def test_a_list_of_choices_is_read_from_a_column_of_mmlu_pro(tmp_path: Path, name: str) -> None:
    row = {"question": "Hottest?", "options": PLANETS, "answer": "B", "answer_index": 1, "category": "physics"}
    path = tmp_path / name
    if path.suffix == ".jsonl":
        written(tmp_path, row)
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    for label_key in ("answer", "answer_index"):
        (prompt,) = load(path, prompt_key="question", label_key=label_key, choices_key="options").prompts
        assert prompt.messages == ({"role": "user", "content": "Hottest?\n\nA. Mars\nB. Venus\nC. Earth"},)
        assert prompt.ground_truth == "B"
        assert compute_score("", "It is hotter than Mercury: \\boxed{B}", prompt.ground_truth)["score"] == 1.0
        assert compute_score("", "\\boxed{C}", prompt.ground_truth)["score"] == 0.0


def test_choices_of_columns_of_gpqa_are_shuffled_the_same_way_each_time(tmp_path: Path) -> None:
    rows = [
        {"Question": f"Question {number}?", **{column: f"{column} to {number}" for column in COLUMNS}}
        for number in range(400)
    ]
    keys = {"prompt_key": "Question", "label_key": COLUMNS[0], "choices_key": COLUMNS}
    prompts = load(written(tmp_path, *rows), **keys).prompts
    for number, prompt in enumerate(prompts):
        question, empty, *lines = prompt.messages[0]["content"].splitlines()
        assert (question, empty) == (f"Question {number}?", "")
        assert sorted(line[3:] for line in lines) == sorted(f"{column} to {number}" for column in COLUMNS)
        assert f"{prompt.ground_truth}. Correct Answer to {number}" in lines
    counts = Counter(prompt.ground_truth for prompt in prompts)
    assert counts.keys() == set("ABCD")
    assert min(counts.values()) > 70
    assert load(written(tmp_path, *reversed(rows)), **keys).prompts[0].messages == prompts[-1].messages


def test_the_choices_follow_the_last_message_of_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hottest?"}]
    path = written(tmp_path, {"prompt": chat, "answer": "Venus", "choices": {"text": PLANETS}})
    (prompt,) = load(path, choices_key="choices.text").prompts
    assert prompt.messages == (chat[0], {"role": "user", "content": "Hottest?\n\nA. Mars\nB. Venus\nC. Earth"})


@pytest.mark.parametrize(
    ("row", "keys", "problem"),
    [
        ({}, "choices", "no list of choices under 'choices' among the keys ['answer', 'prompt']; choices_key names"),
        ({"choices": "A. Mars"}, "choices", "no list of choices"),
        ({"choices": PLANETS[:1]}, "choices", "they must be 2 to 10 texts"),
        ({"choices": [*PLANETS, None]}, "choices", "they must be 2 to 10 texts"),
        ({"choices": list("abcdefghijk")}, "choices", "they must be 2 to 10 texts"),
        ({"choices": PLANETS, "answer": "D"}, "choices", "the ground truth 'D' is no choice's number, letter or own"),
        ({"choices": PLANETS, "answer": 3}, "choices", "the ground truth 3 is no choice's"),
        ({"choices": PLANETS, "answer": True}, "choices", "the ground truth True is no choice's"),
        ({"choices": ["x", "x"], "answer": "x"}, "choices", "the ground truth 'x' is no choice's"),
        ({"a": "Mars", "b": "Venus", "answer": "B"}, ["a", "b"], "the ground truth 'B' is no choice's"),
        ({"a": "Mars", "answer": "Mars"}, ["a", "b"], "they must be 2 to 10 texts"),
    ],
    ids=str,
)
def test_a_malformed_row_says_what_is_wrong(
    tmp_path: Path, row: dict[str, Any], keys: str | list[str], problem: str
) -> None:
    path = written(tmp_path, {"prompt": "Hottest?", "answer": "A"} | row)
    with pytest.raises(UserError) as error:
        load(path, choices_key=keys)
    assert f"{path}:1: " in str(error.value)
    assert problem in str(error.value)
