"""The console of commands and tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

Show = Callable[[str], None]


def terminal(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that does not interpret brackets in text as markup; use `rich.text.Text` for styles."""
    return Console(stderr=stderr, width=width, markup=False, highlight=False)


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
