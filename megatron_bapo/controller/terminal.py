"""The console of commands and tools."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console
from rich.text import Text

Show = Callable[[str], None]


def terminal(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that does not interpret brackets in text as markup; use `rich.text.Text` for styles."""
    return _Terminal(stderr=stderr, width=width, markup=False, highlight=False)


class _Terminal(Console):
    """A console whose output never ends a run.

    It is discarded once the terminal or the reader of the pipe is gone, and line by line while a log's disk is full.
    """

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._buffer.clear()
            else:  # of a terminal that was closed; rich itself calls on_broken_pipe for a pipe
                self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        discard(self.file)


def discard(stream: IO[str]) -> None:
    """Discard what is still written to a stream whose reader is gone, so that no later `print` fails either."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def activities() -> Iterator[Show]:
    """Yield a function that names the current activity: beside a spinner on a terminal, else one line each."""
    console = terminal(stderr=True)
    # isatty besides: FORCE_COLOR makes rich call a log file a terminal.
    if not (console.is_interactive and console.file.isatty()):
        yield lambda activity: console.print(f"{activity} ...", soft_wrap=True)
        return
    with console.status(Text("starting ...")) as status:
        yield lambda activity: status.update(Text(f"{activity} ..."))
