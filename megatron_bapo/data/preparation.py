"""Prepare prompt files for training: drop malformed, duplicate, too long and contaminated rows, and write the rest.

The output has verl's columns (data_source, prompt, ability, reward_model, extra_info).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.data.contamination import EvaluationPrompts, find_overlap
from megatron_bapo.data.prompts import load_prompts, read_prompts
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.files import flush, make_folder, unwritable
from megatron_bapo.records import Prompt

Reason = Literal["malformed", "duplicate", "conflicting", "too_long", "contaminated_exact", "contaminated_ngram"]
REASONS: dict[Reason, str] = {
    "malformed": "malformed",
    "duplicate": "duplicate: same prompt, same ground truth",
    "conflicting": "duplicate: same prompt, other ground truth",
    "too_long": "longer than the limit",
    "contaminated_exact": "contaminated: equals an evaluation prompt",
    "contaminated_ngram": "contaminated: shares an n-gram with one",
}
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Dropped:
    """A dropped row."""

    where: str
    """File and line or row number."""
    reason: Reason
    detail: str


@dataclass(frozen=True)
class Prepared:
    kept: tuple[Prompt, ...]
    dropped: tuple[Dropped, ...]
    lengths: tuple[int, ...]
    """Tokens of each kept prompt; empty without a tokenizer."""

    def counts(self) -> dict[str, int]:
        """Return the number of rows read, kept, and dropped for each reason; the latter add up to the first."""
        by_reason = Counter(dropped.reason for dropped in self.dropped)
        num_rows = len(self.kept) + len(self.dropped)
        return {"rows": num_rows, "kept": len(self.kept), **{reason: by_reason[reason] for reason in REASONS}}

    def token_counts(self) -> dict[str, int]:
        """Return minimum, quantiles (nearest above), maximum and total of the lengths; empty without a tokenizer."""
        if not self.lengths:
            return {}
        quantiles = np.quantile(self.lengths, QUANTILES, method="inverted_cdf")
        named = {f"p{round(100 * q)}": int(value) for q, value in zip(QUANTILES, quantiles, strict=True)}
        return {"min": min(self.lengths), **named, "max": max(self.lengths), "total": sum(self.lengths)}


def prepare(
    sources: Sequence[PromptSourceConfig],
    *,
    evaluation: EvaluationPrompts | None = None,
    num_tokens: Callable[[Prompt], int] | None = None,
    max_prompt_length: int | None = None,
    empty_answers: bool = False,
) -> Prepared:
    """Read the files in order and divide their rows into kept ones and dropped ones with a reason.

    An empty ground truth is malformed unless `empty_answers` allows it, for a reward that needs none. Of rows with the
    same messages, apart from white space, the first one is kept. Raises UserError if a file cannot be read.
    """
    kept: list[Prompt] = []
    dropped: list[Dropped] = []
    lengths: list[int] = []
    first: dict[tuple[str, ...], tuple[str, str]] = {}
    for where, row in _rows(sources):
        if not isinstance(row, Prompt):
            dropped.append(Dropped(where, "malformed", str(row)))
            continue
        if not (empty_answers or row.ground_truth.strip()):
            dropped.append(Dropped(where, "malformed", "the ground truth is empty; no response could be right"))
            continue
        key = _key(row)
        if key in first:
            location, ground_truth = first[key]
            reason = "duplicate" if ground_truth == row.ground_truth else "conflicting"
            dropped.append(Dropped(where, reason, f"of {location}"))
            continue
        first[key] = (where, row.ground_truth)
        length = num_tokens(row) if num_tokens else 0
        if evaluation is not None and (overlap := find_overlap(row, evaluation)):
            kind: Reason = "contaminated_exact" if overlap[0] == "exact" else "contaminated_ngram"
            dropped.append(Dropped(where, kind, f"with {overlap[1]}"))
        elif max_prompt_length is not None and length > max_prompt_length:
            dropped.append(Dropped(where, "too_long", f"{length} tokens; {max_prompt_length} are allowed"))
        else:
            kept.append(row)
            lengths += [length] if num_tokens else []
    return Prepared(tuple(kept), tuple(dropped), tuple(lengths))


def read_evaluation_prompts(sources: Iterable[PromptSourceConfig]) -> list[tuple[str, Prompt]]:
    """Return (location, prompt) of every row of evaluation files.

    Raises UserError for a malformed row, because it could hide a contaminated prompt.
    """
    rows = []
    for where, row in _rows(sources):
        if not isinstance(row, Prompt):
            raise UserError(f"{where}: {row}. Every row of an evaluation file must be valid; correct it")
        rows.append((where, row))
    if not rows:
        raise UserError("the evaluation files contain no prompts; give other files or omit --eval")
    return rows


def _rows(sources: Iterable[PromptSourceConfig]) -> Iterator[tuple[str, Any]]:
    for source in sources:
        assert source.path is not None, "preparation reads files"
        yield from read_prompts(source, source.path, name="train")


def _key(prompt: Prompt) -> tuple[str, ...]:
    return tuple(part for m in prompt.messages for part in (m["role"], " ".join(m["content"].split())))


def verl_row(prompt: Prompt, index: int, ability: str) -> dict[str, Any]:
    """Return one row in verl's columns; `extra_info.index` is `index` unless the prompt has one."""
    return {
        "data_source": prompt.data_source,
        "prompt": list(prompt.messages),
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
        "extra_info": {"index": index, **prompt.extra_info},
    }


def check_output(path: Path) -> None:
    """Create the folder of the output file. Raises UserError if `write_prompts` cannot write the file."""
    if path.suffix not in _WRITERS:
        raise UserError(f"cannot write prompts to {path}: the name must end in {' or '.join(_WRITERS)}")
    if path.is_dir():
        raise UserError(f"--output {path} is a folder; name a file in it")
    make_folder(path.parent, f"--output {path}")


def write_prompts(prompts: Sequence[Prompt], path: Path, *, ability: str) -> None:
    """Write a .parquet or .jsonl file that `data.train` reads, atomically and after reading it back.

    Raises UserError as `check_output` does and for values that Parquet cannot store, RunError if the file does not
    contain the prompts when it is read back.
    """
    check_output(path)
    if not prompts:
        raise UserError(f"no row is left to write to {path}; see the reasons above")
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        _WRITERS[path.suffix]([verl_row(prompt, index, ability) for index, prompt in enumerate(prompts)], partial)
        _compare(prompts, partial)
        flush(partial)
        partial.rename(path)
    except OSError as error:
        raise unwritable(f"--output {path}", error) from None
    finally:
        partial.unlink(missing_ok=True)


def _write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    try:
        pq.write_table(pa.Table.from_pylist(rows), path)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as error:
        raise UserError(
            f"Parquet cannot store these rows ({error}); each field of extra_info must have the same type in all rows: "
            "write a .jsonl file instead"
        ) from error


def _write_jsonl(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


_WRITERS = {".parquet": _write_parquet, ".jsonl": _write_jsonl}


def _compare(prompts: Sequence[Prompt], path: Path) -> None:
    read = load_prompts(PromptSourceConfig(path=path), name="train", system_prompt=None).prompts
    fields = ("messages", "ground_truth", "data_source")
    same = len(read) == len(prompts) and all(
        getattr(one, field) == getattr(other, field)
        for one, other in zip(read, prompts, strict=True)
        for field in fields
    )
    if not same:
        raise RunError(f"{path} does not contain the prompts that were written to it; check the disk, then try again")
