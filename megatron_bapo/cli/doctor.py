"""The `doctor` command."""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_bapo.cli.app import app
from megatron_bapo.controller.terminal import terminal


@app.command(
    epilog="Example: [bold]megatron-bapo doctor --deep[/]\n\n"
    "Exit codes: 0 ready to train, 1 at least one problem was found."
)
def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Also import the large packages, which takes a minute.")] = False,
) -> None:
    """Check this machine and its Python environment, and print how to fix each problem."""
    from megatron_bapo.commands.doctor import run_doctor

    raise typer.Exit(run_doctor(terminal(), deep=deep))
