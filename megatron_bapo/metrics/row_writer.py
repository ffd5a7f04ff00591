"""Append rows to JSON lines files in a thread, so that no event loop waits for a file system."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from megatron_bapo.errors import RunError
from megatron_bapo.files import storage_failure

FLUSH_S = 0.2
"""Seconds that rows are collected before they are written. A process that is killed loses no older ones."""
_Sizes = Future[dict[str, int]]


class RowWriter:
    """Writes rows in the order of the calls. `write` and `sizes` do not wait; they must be called in one thread."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._rows: SimpleQueue[tuple[Path, Mapping[str, Any]] | _Sizes | None] = SimpleQueue()
        self._urgent = Event()
        """Set when somebody waits for the files."""
        self._failure: Exception | None = None
        self._thread = Thread(target=self._run, name="row writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, path: Path, row: Mapping[str, Any]) -> None:
        """Append a row, which must not change any more. Raises RunError if an earlier row could not be written."""
        assert path in self._paths, f"{path} is not among {self._paths}"
        if self._failure is not None:
            raise self._failure
        self._rows.put((path, row))

    def sizes(self) -> Future[dict[str, int]]:
        """Return, by file name, the sizes in bytes that the files have with the rows so far, when these are on disk."""
        sizes = _Sizes()
        self._rows.put(sizes)
        self._urgent.set()
        return sizes

    def close(self) -> None:
        """Write what is left, and end the thread."""
        if self._thread.is_alive():
            self._rows.put(None)
            self._urgent.set()
            self._thread.join()
        atexit.unregister(self.close)

    def _run(self) -> None:
        is_open = True
        while is_open:
            items = [self._rows.get()]
            self._urgent.wait(FLUSH_S)
            self._urgent.clear()
            try:
                while True:
                    items.append(self._rows.get_nowait())
            except Empty:
                is_open = self._write(items)

    def _write(self, items: Sequence[tuple[Path, Mapping[str, Any]] | _Sizes | None]) -> bool:
        """Write the rows and report the sizes in their order; return False if the writer is closed."""
        lines: dict[Path, list[str]] = {}
        for item in items:
            if isinstance(item, tuple):
                lines.setdefault(item[0], []).append(json.dumps(item[1]) + "\n")
                continue
            self._append(lines, is_flushed=True)
            lines.clear()
            if item is None:
                return False
            self._report(item)
        self._append(lines, is_flushed=False)
        return True

    def _append(self, lines: Mapping[Path, Sequence[str]], *, is_flushed: bool) -> None:
        for path in self._paths if is_flushed else lines:
            if path not in lines and not path.exists():
                continue
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(lines.get(path, ()))
                    file.flush()
                    if is_flushed:
                        os.fsync(file.fileno())
            except OSError as error:
                failure = storage_failure(error, path.parent)
                self._failure = self._failure or failure or RunError(f"a row was not written: {error}")

    def _report(self, sizes: _Sizes) -> None:
        if self._failure is not None:
            sizes.set_exception(self._failure)
        else:
            sizes.set_result({path.name: path.stat().st_size if path.exists() else 0 for path in self._paths})
