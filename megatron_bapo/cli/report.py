"""The `report` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_bapo.cli.app import app, messages


@app.command(
    epilog="Example: [bold]megatron-bapo report runs/quickstart[/]\n\n"
    "Exit codes: 0 done, 2 the folder has no metrics of a run."
)
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, such as runs/quickstart.")],
) -> None:
    """Write RUN_DIR/report.html from the metrics of a run, which may still be running."""
    with messages():
        from megatron_bapo.controller.run_report import write_run_report

        typer.echo(write_run_report(run_dir))
