"""Rows of prompt files, streamed, each with the place it stands at for error messages."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_bapo.errors import UserError

ROWS_PER_BATCH = 1024


class Malformed(ValueError):
    """One row breaks a rule; whether that ends the run is the reader's choice."""


def read_rows(path: Path) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """Yield (place, row) of a .jsonl file (the undecoded line; blank ones left out) or a .parquet file (a dict).

    Raises UserError when the file is missing, unreadable, damaged or of another kind.
    """
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise UserError(f"cannot read prompts from {path}: the name must end in {' or '.join(readers)}")
    if not path.is_file():
        raise UserError(f"there is no file {path}; the path is taken from the folder where the run is started")
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error}") from error


def decode(row: bytes | dict[str, Any]) -> dict[str, Any]:
    """One row of `read_rows` as a dict; raises Malformed."""
    if isinstance(row, dict):
        return row
    try:
        value = json.loads(row.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(value, dict):
        raise Malformed(f"a JSON {type(value).__name__}, where an object with a prompt and its answer is needed")
    return value


def _read_jsonl(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
            if content:
                yield f"{path}:{number}", content


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a whole Parquet file: {error}") from error
