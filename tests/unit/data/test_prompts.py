import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.data.prompts import PromptSet, load_prompts, without
from megatron_bapo.errors import UserError

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


def load(path: Path, system_prompt: str | None = None, **options: Any) -> PromptSet:
    return load_prompts(PromptSourceConfig(path=path, **options), name="train", system_prompt=system_prompt)


def write_jsonl(folder: Path, *rows: Any) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def write_parquet(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_plain_jsonl_is_read(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    prompts = load(write_jsonl(tmp_path, {"prompt": "1 + 1?", "answer": "2"}, {"prompt": chat, "answer": "4"})).prompts
    assert [prompt.prompt_id for prompt in prompts] == ["train:0", "train:1"]
    assert prompts[0].messages == ({"role": "user", "content": "1 + 1?"},)
    assert prompts[1].messages == tuple(chat)
    assert [prompt.ground_truth for prompt in prompts] == ["2", "4"]
    assert prompts[0].data_source == "tasks"


def test_slime_jsonl_is_read_with_the_configured_keys(tmp_path):
    path = write_jsonl(tmp_path, {"input": "1 + 1?", "label": "2", "metadata": {"level": 3}})
    (prompt,) = load(path, prompt_key="input", label_key="label").prompts
    assert (prompt.messages[0]["content"], prompt.ground_truth, prompt.extra_info) == ("1 + 1?", "2", {"level": 3})


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_verl_rows_are_read(tmp_path, write):
    (prompt,) = load(write(tmp_path, VERL_ROW)).prompts
    assert prompt.messages == ({"role": "user", "content": "1 + 1?"},)
    assert (prompt.ground_truth, prompt.data_source) == ("2", "openai/gsm8k")
    assert prompt.extra_info == {"split": "train", "index": 0}


def test_plain_parquet_columns_are_read_over_batch_borders(tmp_path):
    path = write_parquet(tmp_path, *({"prompt": f"{i} + 0?", "answer": i} for i in range(2500)))
    assert [prompt.ground_truth for prompt in load(path).prompts] == [str(i) for i in range(2500)]


def test_a_label_key_with_dots_names_a_field_inside_a_column(tmp_path):
    path = write_jsonl(tmp_path, {"prompt": "1 + 1?", "target": {"value": 2}})
    assert load(path, label_key="target.value").prompts[0].ground_truth == "2"


@pytest.mark.parametrize(
    ("value", "text"), [(2, "2"), (0, "0"), (2.5, "2.5"), (False, "False"), (["a", 1], '["a", 1]')]
)
def test_ground_truths_become_text(tmp_path, value, text):
    assert load(write_jsonl(tmp_path, {"prompt": "?", "answer": value})).prompts[0].ground_truth == text


def test_values_that_json_lacks_become_text_in_extra_info(tmp_path):
    row = VERL_ROW | {"extra_info": {"day": pa.scalar(0, pa.date32()).as_py()}}
    assert load(write_parquet(tmp_path, row)).prompts[0].extra_info == {"day": "1970-01-01"}


def test_byte_order_mark_blank_lines_and_windows_line_ends_are_tolerated(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "1"}\r\n\r\n  \r\n{"prompt": "b", "answer": "2"}')
    assert [prompt.ground_truth for prompt in load(path).prompts] == ["1", "2"]


def test_size_keeps_the_start_of_the_file(tmp_path):
    path = write_jsonl(
        tmp_path, *({"prompt": str(i), "answer": i} for i in range(5)), "a broken line after the last kept"
    )
    assert [prompt.ground_truth for prompt in load(path, size=3).prompts] == ["0", "1", "2"]


def test_system_prompt_opens_conversations_without_one(tmp_path):
    chat = [{"role": "system", "content": "Own."}, {"role": "user", "content": "?"}]
    path = write_jsonl(tmp_path, {"prompt": "?", "answer": 1}, {"prompt": chat, "answer": 1})
    plain, own = load(path, system_prompt="Common.").prompts
    assert plain.messages == ({"role": "system", "content": "Common."}, {"role": "user", "content": "?"})
    assert own.messages == tuple(chat)


BAD_LINES = {
    "not_json": ('{"prompt": "a",', "not JSON"),
    "not_an_object": ("[1, 2]", "a JSON list"),
    "no_prompt": (
        '{"question": "a", "answer": 1}',
        "no 'prompt' among the keys ['answer', 'question']; prompt_key names",
    ),
    "no_answer": ('{"prompt": "a"}', "label_key names"),
    "null_answer": ('{"prompt": "a", "answer": null}', "no ground truth"),
    "nan_answer": ('{"prompt": "a", "answer": NaN}', "the ground truth is nan; it must be text or a finite number"),
    "number_as_prompt": ('{"prompt": 7, "answer": 1}', "must be text or a list of messages"),
    "empty_prompt": ('{"prompt": " ", "answer": 1}', "must be non-empty text"),
    "empty_chat": ('{"prompt": [], "answer": 1}', "must be text or a list of messages"),
    "unknown_role": ('{"prompt": [{"role": "usr", "content": "a"}], "answer": 1}', "system, user, assistant, tool"),
    "no_content": ('{"prompt": [{"role": "user"}], "answer": 1}', "needs exactly a role"),
    "image_content": (
        '{"prompt": [{"role": "user", "content": [{"image": "x"}]}], "answer": 1}',
        "it must be non-empty text",
    ),
    "bad_extra_info": ('{"prompt": "a", "answer": 1, "extra_info": "x"}', "must be an object"),
    "bad_data_source": ('{"prompt": "a", "answer": 1, "data_source": 3}', "data_source is 3"),
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_malformed_line_stops_and_names_location_reason_excerpt_and_remedy(tmp_path, line, reason):
    path = write_jsonl(tmp_path, {"prompt": "a", "answer": 1}, "", line)
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert f"{path}:3: " in message
    assert reason in message
    assert line[:60] in message
    assert "set data.train.on_bad_line=skip" in message


@pytest.mark.parametrize("column", ["prompt", "answer", "data_source", "extra_info"])
def test_a_lone_surrogate_makes_its_row_malformed(tmp_path, column):
    row = {"prompt": "1 + 1?", "answer": "2", "data_source": "p", "extra_info": {}}
    path = write_jsonl(tmp_path, row | {column: {"key": "\udc80"} if column == "extra_info" else "a \ud800"}, row)
    with pytest.raises(UserError, match=r"tasks.jsonl:1: contains an unpaired surrogate"):
        load(path)
    assert [prompt.prompt_id for prompt in load(path, on_bad_line="skip").prompts] == ["train:1"]


def test_surrogate_pairs_are_read(tmp_path):
    path = write_jsonl(tmp_path, r'{"prompt": "\ud83d\ude00", "answer": "\\ud800"}')
    (prompt,) = load(path).prompts
    assert (prompt.messages[0]["content"], prompt.ground_truth) == ("\U0001f600", "\\ud800")


def test_a_line_that_is_not_utf8_stops(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "é", "answer": 1}\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.jsonl:1: not UTF-8"):
        load(path)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 200_000], ids=["digits", "nesting"])
def test_json_that_python_does_not_read_is_malformed(tmp_path, value):
    path = write_jsonl(tmp_path, '{"prompt": "1 + 1?", "answer": ' + value, {"prompt": "2 + 2?", "answer": "4"})
    with pytest.raises(UserError, match=r"tasks.jsonl:1: JSON that Python cannot read .* the row starts"):
        load(path)
    assert [prompt.ground_truth for prompt in load(path, on_bad_line="skip").prompts] == ["4"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1_000_000_001, 0], pa.timestamp("ns")),
        pa.array([2**62, 0], pa.timestamp("us")),
        pa.array([2**30, 0], pa.date32()),
        pa.array([1, None], pa.timestamp("us", tz="Mars/Olympus")),
        pa.StringArray.from_buffers(2, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xe9a")),
    ],
    ids=["nanoseconds", "year 148000", "day 2**30", "unknown time zone", "not UTF-8"],
)
def test_a_parquet_value_that_cannot_be_read_makes_its_row_malformed(tmp_path, column):
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.table({"prompt": ["1 + 1?", "2 + 2?"], "answer": ["2", "4"], "extra": column}), path)
    with pytest.raises(UserError, match=r"tasks.parquet, row 1: column 'extra' cannot be read .* remove the column"):
        load(path)
    found = load(path, on_bad_line="skip")
    assert ([prompt.ground_truth for prompt in found.prompts], found.num_skipped) == (["4"], 1)


def test_a_ground_truth_of_bytes_is_malformed(tmp_path):
    """A Parquet column of text that was written without its type is one of bytes."""
    path = write_parquet(tmp_path, {"prompt": "1 + 1?", "answer": b"2"})
    with pytest.raises(UserError, match=r"row 1: the ground truth is b'2'; it must be text"):
        load(path)


def test_a_malformed_parquet_row_is_named(tmp_path):
    path = write_parquet(tmp_path, {"prompt": "a", "answer": 1}, {"prompt": None, "answer": 2})
    with pytest.raises(UserError, match="row 2: no 'prompt'"):
        load(path)


def test_skip_counts_malformed_lines_and_keeps_the_first_reasons(tmp_path):
    path = write_jsonl(tmp_path, *["broken"] * 7, {"prompt": "a", "answer": 1})
    loaded = load(path, on_bad_line="skip")
    assert [prompt.prompt_id for prompt in loaded.prompts] == ["train:7"]
    assert loaded.num_skipped == 7
    assert len(loaded.skipped_reasons) == 5
    assert f"{path}:1: not JSON" in loaded.skipped_reasons[0]


def test_a_file_with_malformed_lines_only_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"every one of the 2 rows .* is malformed; the first: .*:1: not JSON"):
        load(write_jsonl(tmp_path, "broken", "too"), on_bad_line="skip")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match="contains no prompts"):
        load(path)


def test_an_empty_parquet_file_is_refused(tmp_path):
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(UserError, match="contains no prompts"):
        load(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no file .*absent\.jsonl"):
        load(tmp_path / "absent.jsonl")


def test_a_folder_is_refused(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="there is no file"):
        load(tmp_path / "folder.jsonl")


def test_another_extension_is_refused(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text("[]")
    with pytest.raises(UserError, match=r"must end in \.jsonl or \.parquet"):
        load(path)


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = write_parquet(tmp_path, VERL_ROW)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"not a complete Parquet file \(.*\); download or write it again"):
        load(path)


def test_held_out_prompts_are_removed_from_training(tmp_path):
    prompts = load(write_jsonl(tmp_path, *({"prompt": str(i), "answer": i} for i in range(4)))).prompts
    kept, num_left_out = without(prompts, prompts[1:3])
    assert [prompt.ground_truth for prompt in kept] == ["0", "3"]
    assert num_left_out == 2


@pytest.mark.parametrize("content", ["What is 1 + 1?\n", "What is  1 + 1?", "what is １ + 1?"])
def test_held_out_prompts_are_found_whatever_their_spaces_case_and_system_prompt(tmp_path, content):
    held_out = load(write_jsonl(tmp_path, {"prompt": "What is 1 + 1?", "answer": 2})).prompts
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    rows = ({"prompt": chat, "answer": 2}, {"prompt": "What is 1 - 1?", "answer": 0})
    kept, num_left_out = without(load(write_jsonl(tmp_path, *rows)).prompts, held_out)
    assert ([prompt.ground_truth for prompt in kept], num_left_out) == (["0"], 1)


def test_a_column_that_the_first_row_lacks_is_answered_with_the_key_that_names_it(tmp_path: Path) -> None:
    """To skip such rows would often skip all."""
    first = {"question": "2+2", "answer": "4"}
    with pytest.raises(UserError, match=r"Set data\.train\.prompt_key to the right column\.$"):
        load(write_jsonl(tmp_path, first))
    with pytest.raises(UserError, match=r"on_bad_line=skip"):
        load(write_jsonl(tmp_path, {"prompt": "1+1", "answer": "2"}, first))
