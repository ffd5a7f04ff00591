"""Queries on the sampled rollouts of a run, as JSON values."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from megatron_bapo.data.rollout_files import rollout_files
from megatron_bapo.data.rollout_samples import (
    ROWS_PER_GROUP,
    SUMMARY,
    TOKENIZER_FILE,
    read_sample_header,
    token_staleness,
)
from megatron_bapo.errors import UserError
from megatron_bapo.run_directory import RunDirectory
from megatron_bapo.viewer.answers import MAX_BYTES, NotFound, fitting, number
from megatron_bapo.viewer.token_text import TokenTexts

MAX_ROWS, MAX_TOKENS = 2000, 4096
"""Rows of a page of responses, and tokens of a page of a response."""
_LISTED = ("group", "response", "reward", "finish_reason", "update", "clip_low", "clip_high", *SUMMARY)
_FIGURES = {"rollout": "rollout_log_probs", "trainer": "log_probs", "proximal": "proximal_log_probs"} | {
    name: name for name in ("ratio", "entropy", "correction", "marks")
}
_EXCERPT, _MAX_TOKEN, _MAX_ID, _MAX_TEXT, _MAX_STEPS = 160, 2000, 200, 100_000, 100
"""Characters of an excerpt, a token, a prompt's id and a prompt, and steps of a comparison, at most."""
_SEEN, _SHORTEST = 40, 12
"""Characters of an excerpt that the list has room for, and of a beginning that an excerpt leaves out, at least."""
NO_SAMPLES = (
    "no sampled rollouts; logging.rollouts.every_steps turns them on: a run writes them in its first step and in every "
    "step that this number divides, unless it is 0"
)


def damaged(step: int, error: Exception) -> str:
    """Return what to do about a file of a step that cannot be read."""
    reason = " ".join(str(error).split())
    return f"the sampled rollouts of step {step} are damaged ({reason}); copy their file again"


class RowGroups:
    """The row groups that were read last: the newest one, and older ones up to `max_bytes` in all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._lock = max_bytes, threading.Lock()
        self.tables = dict[tuple[Any, ...], pa.Table]()

    def row_group(self, path: Path, modified_ns: int, group: int, columns: tuple[str, ...] | None) -> pa.Table:
        key = path, modified_ns, group, columns
        with self._lock:
            table = self.tables.pop(key, None)
        if table is None:
            table = pq.ParquetFile(path).read_row_group(group, columns=columns)
        with self._lock:
            self.tables[key] = table
            excess = sum(each.nbytes for each in self.tables.values()) - self._max_bytes
            for old in list(self.tables)[:-1]:
                if excess > 0:
                    excess -= self.tables.pop(old).nbytes
        return table


_RECENT = RowGroups(max_bytes=256 << 20)


class Samples:
    """Reads the files as they are now: a run that goes on adds steps."""

    def __init__(self, directory: RunDirectory) -> None:
        self._name, self._folder = directory.root.resolve().name, directory.sampled_rollouts

    def run(self) -> dict[str, Any]:
        """Return the name of the run and its steps with sampled rollouts, or why there are none."""
        steps = [*rollout_files(self._folder)]
        return {"name": self._name, "steps": steps, "message": "" if steps else f"This run has {NO_SAMPLES}."}

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self._folder / TOKENIZER_FILE)

    def step(self, step: int, start: int = 0, count: int = MAX_ROWS) -> dict[str, Any]:
        """Return the header of a step and the summaries of `count` responses from row `start`, as columns."""
        file, header = self._open(step)
        total = file.metadata.num_rows
        return fitting(
            min(count, MAX_ROWS), lambda num: self._step(file, header, step, range(start, start + num), total)
        )

    def _step(self, file: pq.ParquetFile, header: dict[str, Any], step: int, rows: range, total: int) -> dict[str, Any]:
        rows = range(min(rows.start, total), min(rows.stop, total))
        table = _rows(file, rows, [*_LISTED, "prompt_id", "messages"])
        columns = {name: _values(table[name]) for name in _LISTED}
        columns["prompt_id"] = [text[:_MAX_ID] for text in table["prompt_id"].to_pylist()]
        path = rollout_files(self._folder)[step]
        starts = _excerpt_starts(path, path.stat().st_mtime_ns)
        excerpts, groups = [], columns["group"]
        for index, messages in enumerate(table["messages"].to_pylist()):
            first = index == 0 or groups[index] != groups[index - 1]
            excerpts.append(_excerpt(messages, starts) if first else "")
        return {
            "header": header,
            "step": step,
            "total": total,
            "start": rows.start,
            "end": rows.stop,
            "columns": columns | {"excerpt": excerpts},
        }

    def response(self, step: int, row: int) -> dict[str, Any]:
        """Return the prompt of a response."""
        table = self._row(step, row, ("prompt_id", "messages", "ground_truth", "data_source", "extra_info"))
        found = {name: column[0].as_py() for name, column in zip(table.column_names, table.columns, strict=True)}
        left, messages = _MAX_TEXT, []
        for message in json.loads(found.pop("messages")):
            content = str(message["content"])
            messages.append({"role": str(message["role"])[:_MAX_ID], "content": content[:left]})
            messages[-1]["num_cut"] = max(0, len(content) - left)
            left = max(0, left - len(content))
        return {name: value[: _MAX_TEXT // 10] for name, value in found.items()} | {"messages": messages[:1000]}

    def tokens(self, step: int, row: int, start: int = 0, count: int = MAX_TOKENS) -> dict[str, Any]:
        """Return `count` tokens of a response from `start`, as columns; figures are null at tokens without one."""
        table = self._row(step, row)
        policy_version = self._open(step)[1]["policy_version"]
        total = len(table["response_token_ids"][0])

        def page(num: int) -> dict[str, Any]:
            rows = range(min(start, total), min(start + num, total))
            columns = self._token_columns(table, policy_version, rows)
            return {"start": rows.start, "end": rows.stop, "total": total, "columns": columns}

        return fitting(min(count, MAX_TOKENS), page)

    def search(self, step: int, text: str) -> dict[str, Any]:
        """Return the rows whose response, prompt or ground truth has the text, in any case."""
        file, _ = self._open(step)
        wanted, prompts, found = text.lower(), dict[str, bool](), list[int]()
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["text", "messages", "ground_truth"])
            masks = [
                pc.match_substring(table[name], text, ignore_case=True).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
                for name in ("text", "ground_truth")
            ]
            messages = table["messages"].to_pylist()
            for each in set(messages) - prompts.keys():
                prompts[each] = any(wanted in content.lower() for content in _contents(each))
            hits = np.logical_or.reduce([*masks, [prompts[each] for each in messages]])
            found += (ROWS_PER_GROUP * group + np.flatnonzero(hits)).tolist()
        return {"rows": found[: MAX_BYTES // 10]}

    def history(self, step: int, row: int) -> dict[str, Any]:
        """Return the steps that have responses to the same prompt, with their rows; the last `_MAX_STEPS` of them.

        `problems` name the steps whose files cannot be read.
        """
        prompt_id = self._row(step, row, ("prompt_id",))["prompt_id"][0].as_py()
        steps, problems = list[dict[str, Any]](), list[str]()
        for each_step, path in rollout_files(self._folder).items():
            try:
                rows = [i for i, each in enumerate(_prompt_ids(path, path.stat().st_mtime_ns)) if each == prompt_id]
            except (OSError, pa.ArrowException) as error:
                problems.append(damaged(each_step, error)[:_MAX_TOKEN])
                continue
            if rows:
                steps.append({"step": each_step, "rows": rows[:1000]})
        return {"prompt_id": prompt_id[:_MAX_ID], "steps": steps[-_MAX_STEPS:], "problems": problems[-_MAX_STEPS:]}

    def _open(self, step: int) -> tuple[pq.ParquetFile, dict[str, Any]]:
        path = rollout_files(self._folder).get(step)
        if path is None:
            raise NotFound(f"step {step} has no sampled rollouts")
        metadata, header = _metadata(path, path.stat().st_mtime_ns)
        return pq.ParquetFile(path, metadata=metadata), header

    def _row(self, step: int, row: int, columns: Sequence[str] | None = None) -> pa.Table:
        file, _ = self._open(step)
        if not 0 <= row < file.metadata.num_rows:
            raise NotFound(f"step {step} has no response {row}")
        path = rollout_files(self._folder)[step]
        names = None if columns is None else tuple(columns)
        group, place = divmod(row, ROWS_PER_GROUP)
        return _RECENT.row_group(path, path.stat().st_mtime_ns, group, names).slice(place, 1)

    def _token_columns(self, table: pa.Table, policy_version: int, tokens: range) -> dict[str, list[Any]]:
        row = {name: table[name][0] for name in table.column_names}
        token_ids = row["response_token_ids"].values.to_numpy().tolist()
        mask = row["loss_mask"]
        sampled = np.array(mask.as_py(), bool) if mask.is_valid else np.ones(len(token_ids), bool)
        first = int(sampled[: tokens.start].sum())
        sampled = sampled[tokens.start : tokens.stop]
        own = slice(first, first + int(sampled.sum()))
        spans = [(span["policy_version"], span["num_tokens"]) for span in row["version_spans"].as_py()]
        staleness = token_staleness(spans, policy_version)
        figures = {key: row[name] for key, name in _FIGURES.items() if row[name].is_valid}
        arrays = {key: scalar.values.to_numpy(zero_copy_only=False) for key, scalar in figures.items()}
        arrays |= {"advantage": row["advantages"].values.to_numpy(), "staleness": staleness}
        arrays["version"] = policy_version - staleness
        texts = self._texts.texts(token_ids)[tokens.start : tokens.stop]
        columns = {"text": [text[:_MAX_TOKEN] for text in texts], "id": token_ids[tokens.start : tokens.stop]}
        for key, values in arrays.items():
            spread = iter(_numbers(values[own]))
            columns[key] = [next(spread, None) if each else None for each in sampled.tolist()]
        return columns | {"sampled": sampled.astype(int).tolist()}


def _rows(file: pq.ParquetFile, rows: range, columns: list[str]) -> pa.Table:
    groups = [*range(rows.start // ROWS_PER_GROUP, -(-rows.stop // ROWS_PER_GROUP))] if rows else []
    table = file.read_row_groups(groups, columns=columns)
    return table.slice(rows.start % ROWS_PER_GROUP if rows else 0, len(rows))


def _values(column: pa.ChunkedArray) -> list[Any]:
    if pa.types.is_string(column.type):
        return column.to_pylist()
    return [None if value is None else number(value) for value in column.to_pylist()]


def _numbers(values: np.ndarray) -> list[Any]:
    return values.tolist() if values.dtype.kind in "iu" else [number(value) for value in values.tolist()]


def _contents(messages: str) -> list[str]:
    return [str(message["content"]) for message in json.loads(messages)]


def _last_line(messages: str) -> str:
    """Return the last message on one line."""
    return " ".join(" ".join(_contents(messages)[-1:]).split())


def _excerpt(messages: str, starts: Mapping[str, int]) -> str:
    """Return a part of the last message, from the place in `starts` on."""
    line = _last_line(messages)
    start = starts.get(line, 0)
    shown = f"…{line[start:]}" if start else line
    return shown if len(shown) <= _EXCERPT else shown[: _EXCERPT - 1] + "…"


def excerpt_starts(lines: Collection[str]) -> dict[str, int]:
    """Return where the excerpt of each line starts, so that different lines have different excerpts.

    That is after what all lines begin with. A line that differs from each other one only later than a reader sees
    starts there.
    """
    ordered = sorted(lines)
    if len(ordered) < 2:
        return {}
    shared = [_num_shared(*pair) for pair in pairwise(ordered)]
    nearest = map(max, [0, *shared], [*shared, 0])
    common = _whole_words(ordered[0], min(shared))
    starts = [
        common if same - common < _SEEN else _whole_words(line, same)
        for line, same in zip(ordered, nearest, strict=True)
    ]
    return dict(zip(ordered, starts, strict=True))


def _num_shared(one: str, other: str) -> int:
    """Return how many first characters the lines share."""
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differing, min(len(one), len(other)))


def _whole_words(line: str, length: int) -> int:
    """Return how much to cut of the first characters of a line: whole words, and 0 if it is not worth it."""
    end = line.rfind(" ", max(0, length - _SEEN // 2), length) + 1 or length
    return end if end >= _SHORTEST else 0


@lru_cache(maxsize=32)
def _metadata(path: Path, modified_ns: int) -> tuple[pq.FileMetaData, dict[str, Any]]:
    try:
        file = pq.ParquetFile(path)
        return file.metadata, vars(read_sample_header(file))
    except (pa.ArrowInvalid, UserError) as error:
        raise UserError(f"{path} has no sampled rollouts ({error}); copy it again, or show another step") from None


@lru_cache(maxsize=32)
def _excerpt_starts(path: Path, modified_ns: int) -> dict[str, int]:
    messages = pq.read_table(path, columns=["messages"])["messages"].unique().to_pylist()
    return excerpt_starts({_last_line(each) for each in messages})


@lru_cache(maxsize=1024)
def _prompt_ids(path: Path, modified_ns: int) -> list[str]:
    return pq.read_table(path, columns=["prompt_id"])["prompt_id"].to_pylist()
