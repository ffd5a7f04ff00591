"""Prompts from files and generators, as `records.Prompt`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.data.choices import lettered
from megatron_bapo.data.contamination import normalized_text
from megatron_bapo.data.prompt_files import Malformed, MissingColumn, Row, decode, read_rows
from megatron_bapo.data.reasoning_gym_tasks import generate_entries
from megatron_bapo.errors import UserError
from megatron_bapo.records import Prompt

NUM_SKIPPED_REASONS = 5
LABEL_KEYS = ("reward_model.ground_truth", "answer", "label")
EXTRA_INFO_KEYS = ("extra_info", "metadata")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one source."""

    prompts: list[Prompt]
    num_skipped: int = 0
    """Number of malformed rows skipped under `on_bad_line: skip`."""
    skipped_reasons: tuple[str, ...] = ()
    """Problems of the first few skipped rows."""


def load_prompts(source: PromptSourceConfig, *, name: str, system_prompt: str | None) -> PromptSet:
    """Read or generate the prompts of one source.

    `name` (train, validation) is the prefix of every prompt_id. `system_prompt` is prepended to each conversation
    without a system message. Raises UserError for a file that cannot be read, a malformed row, or parameters that a
    generator rejects.
    """
    if source.reasoning_gym is not None:
        assert source.size is not None, "the schema requires size with reasoning_gym"
        entries = generate_entries(source.reasoning_gym, size=source.size, seed=source.seed, distinct=source.distinct)
        return PromptSet(
            [
                Prompt(
                    prompt_id=f"{name}:{index}",
                    messages=_messages(entry["question"], system_prompt),
                    ground_truth="" if entry["answer"] is None else str(entry["answer"]),
                    data_source=f"reasoning_gym/{task}",
                    extra_info=entry,
                )
                for index, (task, entry) in enumerate(entries)
            ]
        )
    assert source.path is not None, "the schema requires path or reasoning_gym"
    return _load_file(source, source.path, name, system_prompt)


def without(prompts: Iterable[Prompt], held_out: Iterable[Prompt]) -> tuple[list[Prompt], int]:
    """Return the prompts whose task is not in `held_out`, and the number of those left out.

    Tasks are compared as in the search for contamination: without white space, case, width and system messages.
    """
    prompts = list(prompts)
    held_out_texts = {normalized_text(prompt) for prompt in held_out}
    kept = [prompt for prompt in prompts if normalized_text(prompt) not in held_out_texts]
    return kept, len(prompts) - len(kept)


def read_prompts(
    source: PromptSourceConfig, path: Path, *, name: str, system_prompt: str | None = None
) -> Iterator[tuple[str, Prompt | Malformed]]:
    """Yield (location, prompt) for every row of a file; a malformed row yields its Malformed error."""
    for index, (where, raw) in enumerate(read_rows(path)):
        try:
            yield where, _to_prompt(decode(raw), source, path, f"{name}:{index}", system_prompt)
        except Malformed as error:
            yield where, error if raw is error else error.followed_by(f"; the row starts {_excerpt(raw)}")


def _load_file(source: PromptSourceConfig, path: Path, name: str, system_prompt: str | None) -> PromptSet:
    num_skipped = 0
    reasons: list[str] = []

    def well_formed() -> Iterable[Prompt]:
        nonlocal num_skipped
        rows = read_prompts(source, path, name=name, system_prompt=system_prompt)
        for index, (where, row) in enumerate(rows):
            if isinstance(row, Prompt):
                yield row
                continue
            problem = f"{where}: {row}"
            if source.on_bad_line == "stop" and isinstance(row, MissingColumn) and row.key and index == 0:
                raise UserError(
                    f"{problem}. Set data.{name}.{row.key} to the right column."
                )  # all rows may lack the column
            if source.on_bad_line == "stop":
                raise UserError(f"{problem}. Correct it, or set data.{name}.on_bad_line=skip to skip such rows.")
            num_skipped += 1
            if len(reasons) < NUM_SKIPPED_REASONS:
                reasons.append(problem)

    prompts = list(islice(well_formed(), source.size))
    if not prompts and num_skipped:
        raise UserError(f"every one of the {num_skipped} rows of {path} is malformed; the first: {reasons[0]}")
    if not prompts:
        raise UserError(f"{path} contains no prompts; give a file with a prompt and its answer in each row")
    return PromptSet(prompts, num_skipped, tuple(reasons))


def _to_prompt(
    row: Mapping[str, Any], source: PromptSourceConfig, path: Path, prompt_id: str, system_prompt: str | None
) -> Prompt:
    prompt = _lookup(row, source.prompt_key)
    if prompt is None:
        raise MissingColumn(
            f"no {source.prompt_key!r} among the keys {sorted(row)}; prompt_key names the column of the prompt",
            "prompt_key" if row else "",
        )
    label_keys = LABEL_KEYS if source.label_key is None else (source.label_key,)
    ground_truth = next((value for key in label_keys if (value := _lookup(row, key)) is not None), None)
    if ground_truth is None:
        raise MissingColumn(
            f"no ground truth under {' or '.join(map(repr, label_keys))} among the keys {sorted(row)}; "
            "label_key names the column of the ground truth",
            "label_key" if row else "",
        )
    messages = _messages(prompt, system_prompt)
    if source.choices_key is not None:
        messages, ground_truth = _with_choices(messages, row, source.choices_key, ground_truth)
    return Prompt(
        prompt_id=prompt_id,
        messages=messages,
        ground_truth=_text(ground_truth),
        data_source=_data_source(row, path),
        extra_info=_extra_info(row),
    )


def _lookup(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column, or of a nested field if `key` has dots; None if it is missing."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _messages(prompt: Any, system_prompt: str | None) -> tuple[dict[str, str], ...]:
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(chat, list) or not chat:
        raise Malformed(f"the prompt is {prompt!r:.80}; it must be text or a list of messages with role and content")
    messages = [_message(message) for message in chat]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return tuple(messages)


def _with_choices(
    messages: tuple[dict[str, str], ...], row: Mapping[str, Any], key: str | tuple[str, ...], right: Any
) -> tuple[tuple[dict[str, str], ...], str]:
    *before, last = messages
    choices = _lookup(row, key) if isinstance(key, str) else [_lookup(row, column) for column in key]
    if not isinstance(choices, list):
        raise Malformed(f"no list of choices under {key!r} among the keys {sorted(row)}; choices_key names its column")
    content, letter = lettered(last["content"], choices, right, shuffled=not isinstance(key, str))
    return (*before, {**last, "content": content}), letter


def _message(message: Any) -> dict[str, str]:
    # In Parquet every message has the union of all messages' fields, with None for absent ones.
    fields = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if fields.keys() != {"role", "content"} or fields["role"] not in ROLES:
        raise Malformed(f"the message {message!r:.80} needs exactly a role ({', '.join(ROLES)}) and a content")
    if not isinstance(fields["content"], str) or not fields["content"].strip():
        raise Malformed(
            f"the {fields['role']} message's content is {fields['content']!r:.80}; it must be non-empty text"
        )
    return {"role": fields["role"], "content": fields["content"]}


def _text(ground_truth: Any) -> str:
    if isinstance(ground_truth, bytes) or (isinstance(ground_truth, float) and not math.isfinite(ground_truth)):
        raise Malformed(f"the ground truth is {ground_truth!r:.80}; it must be text or a finite number")
    if isinstance(ground_truth, dict | list):
        return json.dumps(ground_truth, ensure_ascii=False, default=str)
    return str(ground_truth)


def _data_source(row: Mapping[str, Any], path: Path) -> str:
    data_source = row.get("data_source")
    if data_source is None:
        return path.stem
    if not isinstance(data_source, str):
        raise Malformed(f"data_source is {data_source!r:.80}; it must be text")
    return data_source


def _extra_info(row: Mapping[str, Any]) -> dict[str, Any]:
    value = next((row[key] for key in EXTRA_INFO_KEYS if row.get(key) is not None), {})
    if not isinstance(value, dict):
        raise Malformed(f"extra_info (or metadata) is {value!r:.80}; it must be an object")
    # Parquet can also contain dates, decimals and bytes, which become text.
    return json.loads(json.dumps(value, default=str))


def _excerpt(raw: Row) -> str:
    text = raw.decode("utf-8", errors="replace").strip() if isinstance(raw, bytes) else repr(raw)
    return f"{text[:120]!r}"
