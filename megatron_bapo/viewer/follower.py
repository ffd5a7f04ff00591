"""Reading a JSON lines file while a run appends to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bapo.errors import RunError
from megatron_bapo.metrics.sinks import read_new_rows, read_rows

_MAX_READ, _MAX_LINE = 1 << 24, 1 << 27
"""Bytes of the file that are read at a time, and of its longest line."""
_TAIL = 256
"""Bytes before the place read so far, by which a file that was cut and written on is recognized."""


@dataclass(frozen=True)
class NewRows:
    """What was read at a time."""

    rows: list[dict[str, Any]]
    from_start: bool
    """Whether the file was replaced or cut, so that the rows read before no longer count."""
    is_all: bool
    """Whether the file has no more complete rows."""


class Follower:
    """Reads each row once. A resumed run cuts or replaces a file, which is then read from its start."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._tail, self._num_starts = path, 0, b"", 0

    @property
    def version(self) -> str:
        """Changes when rows have been read."""
        return f"{self._num_starts}.{self._offset}"

    def read(self) -> NewRows:
        """Return the next rows of the file as it is now; none if it does not exist.

        Raises RunError at a line that is not a row.
        """
        from_start = self._offset > 0 and not self._continues()
        if from_start:
            self._offset, self._tail, self._num_starts = 0, b"", self._num_starts + 1
        if not self._path.is_file():
            return NewRows([], from_start, True)
        limit = _MAX_READ
        while True:
            try:
                rows, offset = read_new_rows(self._path, self._offset, limit)
            except ValueError as error:
                read_rows(self._path)  # its error has the number of the line
                raise RunError(f"{self._path} was changed while it was read: {error}") from None
            is_all = self._path.stat().st_size < self._offset + limit
            if rows or is_all:
                break
            limit *= 2
            if limit > _MAX_LINE:
                raise RunError(f"{self._path} has a line of more than {_MAX_LINE // 2} bytes after byte {self._offset}")
        if not all(isinstance(row, dict) for row in rows):
            raise RunError(
                f"{self._path} has a line after byte {self._offset} that is not a JSON object; repair or delete it"
            )
        self._offset = offset
        self._tail = self._before(offset)
        return NewRows(rows, from_start, is_all)

    def _continues(self) -> bool:
        return self._path.is_file() and self._before(self._offset) == self._tail

    def _before(self, offset: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(max(0, offset - _TAIL))
            return file.read(min(offset, _TAIL))
