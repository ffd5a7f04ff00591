"""Print what `train` and `submit` will do with a configuration."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.table import Table
from rich.text import Text

from megatron_bapo.config.arithmetic import batch_arithmetic
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.terminal import terminal


def print_run_plan(config: Config, warnings: Sequence[str], notes: Sequence[str] = ()) -> None:
    """Print the batch arithmetic, then notes and warnings."""
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, explanation in [("run directory", str(config.run_dir)), *batch_arithmetic(config)]:
        table.add_row(name, Text(explanation))
    terminal().print(table)
    for note in notes:
        typer.echo(note)
    print_warnings(warnings)


def print_text(title: str, text: str) -> None:
    """Print a text under its title, indented, with its own line breaks only."""
    typer.echo("\n".join([f"{title}:", *(f"    {line}" for line in text.split("\n"))]))


def print_warnings(warnings: Sequence[str]) -> None:
    """Print each warning on a line of its own."""
    console = terminal()
    for warning in warnings:
        console.print(Text("warning: ", "yellow").append(warning, "default"), soft_wrap=True)
