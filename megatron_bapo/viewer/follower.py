"""Reading a JSON lines file while a run appends to it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from megatron_bapo.errors import RunError

Row = TypeVar("Row")
_MAX_READ, _MAX_LINE = 1 << 24, 1 << 27
"""Bytes of the file that are read at a time, and of its longest line."""
_TAIL, _MAX_MARK = 256, 1 << 16
"""Bytes before the place read so far, and of a damaged line, by which a changed file is recognized."""
_MAX_NAMED, _MAX_REASON = 5, 200
"""Damaged lines of a file that are named, and characters of the reason, at most."""


@dataclass(frozen=True)
class NewRows(Generic[Row]):
    """What was read at a time."""

    rows: list[Row]
    from_start: bool
    """Whether the file was replaced or cut, so that the rows read before no longer count."""
    is_all: bool
    """Whether the file has no more complete rows."""


class Follower(Generic[Row]):
    """Reads each row once. A file that a resumed run has cut or replaced, or whose damaged lines somebody has repaired,
    is read from its start.

    `parse` makes a row of the object in a line; a line for which it raises, or that is no object, is left out and named
    in `problems`.
    """

    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], Row]) -> None:
        self._path, self._parse, self._num_starts = path, parse, 0
        self._restart()

    def _restart(self) -> None:
        self._offset, self._num_lines, self._tail = 0, 0, (0, b"")
        self._damaged, self._num_damaged = dict[tuple[int, bytes], str](), 0

    @property
    def version(self) -> str:
        """Changes when rows have been read."""
        return f"{self._num_starts}.{self._offset}"

    @property
    def problems(self) -> list[str]:
        """What is wrong with the lines that were left out: a sentence for each of the first ones."""
        more = self._num_damaged - len(self._damaged)
        return [*self._damaged.values()] + ([f"{self._path} has {more} more lines that are left out"] if more else [])

    def read(self) -> NewRows[Row]:
        """Return the next rows of the file as it is now; none if it does not exist.

        Raises RunError at a line that is too long.
        """
        from_start = self._offset > 0 and not self._continues()
        if from_start:
            self._restart()
            self._num_starts += 1
        if not self._path.is_file():
            return NewRows([], from_start, True)
        complete, is_all = self._complete_lines()
        rows = list[Row]()
        for line in io.BytesIO(complete):
            self._num_lines += 1
            try:
                rows.append(self._parse(_json_object(line)))
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
                self._leave_out(line, error)
            self._offset += len(line)
        if complete:
            self._tail = self._offset - len(complete[-_TAIL:]), complete[-_TAIL:]
        return NewRows(rows, from_start, is_all)

    def _leave_out(self, line: bytes, error: Exception) -> None:
        self._num_damaged += 1
        if len(self._damaged) < _MAX_NAMED:
            self._damaged[self._offset, line[:_MAX_MARK]] = (
                f"{self._path}, line {self._num_lines} is left out: {_reason(error)[:_MAX_REASON]}; "
                "repair or delete that line"
            )

    def _complete_lines(self) -> tuple[bytes, bool]:
        """Return complete lines from the offset on, each with its end, and whether there are no more of them."""
        limit = _MAX_READ
        while limit <= _MAX_LINE:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                found = file.read(limit)
            complete = found[: found.rfind(b"\n") + 1]
            is_all = len(found) < limit
            if complete or is_all:
                return complete, is_all
            limit *= 2
        raise RunError(f"{self._path} has a line of more than {_MAX_LINE} bytes after byte {self._offset}")

    def _continues(self) -> bool:
        if not self._path.is_file():
            return False
        with self._path.open("rb") as file:
            return all(_read_at(file, place, len(known)) == known for place, known in (self._tail, *self._damaged))


def _read_at(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _json_object(line: bytes) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise TypeError(f"it is not a JSON object but a {type(value).__name__}")
    return value


def _reason(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"it is not JSON ({error.msg} at character {error.pos + 1})"
        case KeyError():
            return f"it has no {error.args[0]}"
        case _:
            return str(error)
