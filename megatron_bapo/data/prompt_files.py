"""Stream the rows of prompt files, each with its location for error messages."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_bapo.errors import UserError

ROWS_PER_BATCH = 1024
_NO_VALUE = (ValueError, OverflowError, KeyError)
"""What pyarrow raises for text that is not UTF-8, for a time that Python cannot hold, and for an unknown time zone."""
_SURROGATE = re.compile(rb"\\u[dD][89abcdefABCDEF]")
"""Escape of a surrogate in JSON, paired or not."""


class Malformed(ValueError):
    """A row that breaks a rule; the caller decides whether this ends the run."""

    def followed_by(self, more: str) -> Malformed:
        """Return the same error with a longer message."""
        return Malformed(f"{self}{more}")


class MissingColumn(Malformed):
    """A row without the column that `key` of a prompt source names; all rows may lack it. "" for a row without any."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key

    def followed_by(self, more: str) -> MissingColumn:
        return MissingColumn(f"{self}{more}", self.key)


Row = bytes | dict[str, Any] | Malformed
"""An undecoded line, a row as a dict of columns, or a row that cannot be read."""


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield (location, row) of a .jsonl file (blank lines skipped) or a .parquet file.

    Raises UserError if the file is missing, unreadable, damaged or of another kind.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise UserError(f"cannot read prompts from {path}: the name must end in {' or '.join(readers)}")
    if not path.is_file():
        raise UserError(f"there is no file {path}; relative paths start at the folder where the run is started")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from error


def decode(row: Row) -> dict[str, Any]:
    """Return one row of `read_rows` as a dict. Raises Malformed."""
    if isinstance(row, Malformed):
        raise row
    if isinstance(row, dict):
        return row
    try:
        value = json.loads(row.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, too deeply nested lists
        raise Malformed(f"JSON that Python cannot read ({error})") from error
    if not isinstance(value, dict):
        raise Malformed(f"a JSON {type(value).__name__} instead of an object with a prompt and its answer")
    if _SURROGATE.search(row) and not _is_unicode(value):
        raise Malformed("contains an unpaired surrogate, which is not Unicode text and which tokenizers refuse")
    return value


def _is_unicode(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
            if content:
                yield f"{path}:{number}", content


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                for row in _rows(batch):
                    number += 1
                    yield f"{path}, row {number}", row
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a complete Parquet file ({error}); download or write it again") from error


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]] | list[dict[str, Any] | Malformed]:
    try:
        return batch.to_pylist()
    except _NO_VALUE:
        return [_row(batch.slice(index, 1)) for index in range(batch.num_rows)]


def _row(batch: pa.RecordBatch) -> dict[str, Any] | Malformed:
    """Return the only row of a batch."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            (row[name],) = column.to_pylist()
        except _NO_VALUE as error:
            return Malformed(f"column {name!r} cannot be read ({error}); correct it, or remove the column")
    return row
