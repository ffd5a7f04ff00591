import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.data.contamination import index_evaluation_prompts
from megatron_bapo.data.preparation import Prepared, prepare, read_evaluation_prompts, write_prompts
from megatron_bapo.data.prompts import load_prompts
from megatron_bapo.errors import UserError

LONG = "three red foxes jump over seven lazy dogs in the park"


def source(folder: Path, *rows: Any, name: str = "tasks.jsonl", **keys: str) -> PromptSourceConfig:
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return PromptSourceConfig.model_validate({"path": path, **keys})


def task(prompt: Any, answer: Any = "1", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answer": answer, **more}


def dropped(prepared: Prepared) -> list[tuple[str, str]]:
    return [(row.where.rpartition("/")[2], row.reason) for row in prepared.dropped]


def test_every_row_is_kept_or_dropped_for_one_reason(tmp_path):
    evaluation = source(tmp_path, task("What is 5 + 5?"), task(f"{LONG}?"), name="eval.jsonl")
    first = source(
        tmp_path,
        task("What is 1 + 1?", 2),
        task("What is\t1 +  1? ", 2),
        "{oops",
        task("What is 1 + 1?", 3),
        task("what is 5+5?"),
        task(f"Yesterday {LONG}; how many legs?"),
        task("x" * 50),
        task("What is 1 - 1?", 0),
        task("half \ud800 a pair"),
    )
    second = source(tmp_path, {"input": "What is 1 - 1?", "label": 0}, name="more.jsonl", prompt_key="input")

    prepared = prepare(
        [first, second],
        evaluation=index_evaluation_prompts(read_evaluation_prompts([evaluation])),
        num_tokens=lambda prompt: len(prompt.messages[0]["content"]),
        max_prompt_length=49,
    )

    assert [prompt.messages[0]["content"] for prompt in prepared.kept] == ["What is 1 + 1?", "What is 1 - 1?"]
    assert dropped(prepared) == [
        ("tasks.jsonl:2", "duplicate"),
        ("tasks.jsonl:3", "malformed"),
        ("tasks.jsonl:4", "conflicting"),
        ("tasks.jsonl:5", "contaminated_exact"),
        ("tasks.jsonl:6", "contaminated_ngram"),
        ("tasks.jsonl:7", "too_long"),
        ("tasks.jsonl:9", "malformed"),
        ("more.jsonl:1", "duplicate"),
    ]
    assert prepared.dropped[4].detail == f"with {evaluation.path}:2"
    assert prepared.counts() == {
        "rows": 10,
        "kept": 2,
        "malformed": 2,
        "duplicate": 2,
        "conflicting": 1,
        "too_long": 1,
        "contaminated_exact": 1,
        "contaminated_ngram": 1,
    }
    assert prepared.token_counts() == {"min": 14, "p50": 14, "p90": 14, "p99": 14, "max": 14, "total": 28}


def test_a_row_with_an_empty_answer_is_malformed_unless_allowed(tmp_path):
    rows = source(tmp_path, task("1 + 1?", ""), task("2 + 2?", " "), task("3 + 3?", 6))
    prepared = prepare([rows])
    assert dropped(prepared) == [("tasks.jsonl:1", "malformed"), ("tasks.jsonl:2", "malformed")]
    assert "the ground truth is empty" in prepared.dropped[0].detail
    assert len(prepare([rows], empty_answers=True).kept) == 3


def test_a_file_that_is_given_twice_is_read_twice(tmp_path):
    one = source(tmp_path, task("What is 1 + 1?"))

    assert prepare([one, one]).counts()["duplicate"] == 1


def test_other_roles_make_other_prompts(tmp_path):
    system = [{"role": "system", "content": "1 + 1?"}, {"role": "user", "content": "2"}]
    user = [{"role": "user", "content": "1 + 1?"}, {"role": "user", "content": "2"}]

    assert prepare([source(tmp_path, task(system), task(user))]).counts()["kept"] == 2


def test_lengths_are_counted_over_kept_rows(tmp_path):
    rows = [task("x" * length) for length in range(1, 201)]
    prepared = prepare([source(tmp_path, *rows)], num_tokens=lambda prompt: len(prompt.messages[0]["content"]))

    assert prepared.token_counts() == {"min": 1, "p50": 100, "p90": 180, "p99": 198, "max": 200, "total": 20100}


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_written_prompts_have_verls_columns_and_are_read_back_unchanged(tmp_path, name):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2, 日本?"}]
    rows = [
        {"data_source": "gsm8k", **task("1 + 1?", 2, extra_info={"split": "train", "index": 7})},
        task(chat, 4, metadata={"level": 3}),
    ]
    prompts = prepare([source(tmp_path, *rows)]).kept

    write_prompts(prompts, tmp_path / "out" / name, ability="math")

    path = tmp_path / "out" / name
    lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else []
    written = [json.loads(line) for line in lines] or pq.read_table(path).to_pylist()
    assert [{**row, "extra_info": row["extra_info"]["index"]} for row in written] == [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": "1 + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": 7,
        },
        {
            "data_source": "tasks",
            "prompt": chat,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": 1,
        },
    ]
    assert written[1]["extra_info"]["level"] == 3
    read = load_prompts(PromptSourceConfig(path=path), name="train", system_prompt=None).prompts
    assert [(p.messages, p.ground_truth, p.data_source) for p in read] == [
        (p.messages, p.ground_truth, p.data_source) for p in prompts
    ]
    assert [file.name for file in path.parent.iterdir()] == [name]


@pytest.mark.parametrize(
    ("infos", "name", "message"),
    [
        (({"a": 1}, {"a": "one"}), "train.parquet", "write a .jsonl file"),
        (({"a": {}}, {}), "train.parquet", "write a .jsonl file"),
        (({"a": 2**64}, {}), "train.parquet", "write a .jsonl file"),
        (({}, {}), "train.csv", "must end in .parquet or .jsonl"),
    ],
)
def test_a_failed_write_leaves_no_partial_file_and_keeps_an_earlier_one(tmp_path, infos, name, message):
    prompts = prepare([source(tmp_path, *(task(f"{i}?", extra_info=info) for i, info in enumerate(infos)))]).kept
    target = tmp_path / "out" / name
    target.parent.mkdir()
    target.write_text("an earlier file")

    with pytest.raises(UserError, match=message):
        write_prompts(prompts, target, ability="math")

    assert [path.read_text() for path in target.parent.iterdir()] == ["an earlier file"]


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no row is left"):
        write_prompts([], tmp_path / "train.jsonl", ability="math")


def test_a_malformed_evaluation_row_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"tasks.jsonl:2: not JSON .* must be valid"):
        read_evaluation_prompts([source(tmp_path, task("1?"), "{oops")])
