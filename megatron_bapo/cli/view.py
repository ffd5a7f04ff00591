"""The `view` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_bapo.cli.app import app, messages
from megatron_bapo.errors import UserError


@app.command(
    epilog="Examples: [bold]megatron-bapo view runs/quickstart[/], [bold]megatron-bapo view runs/a runs/b[/]\n\n"
    "Exit codes: 0 done, 2 a folder holds no run, a file cannot be written, or the input is wrong."
)
def view(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR", help="Folders of runs, such as runs/quickstart.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: a free one.")] = 0,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a self-contained page of one step instead.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step for --export; default: the last one.")] = None,
) -> None:
    """Show runs in a browser: sampled rollouts token by token, and figures and timeline as the runs write them.

    The pages are served on this machine only, at a URL with a secret token. Several runs share each figure.
    """
    with messages():
        from megatron_bapo.viewer.server import opened, serve

        if step is not None and export is None:
            raise UserError("--step is for --export; add --export FILE, or choose the step on the page")
        if export is not None and len(run_dirs) > 1:
            raise UserError(f"--export writes a step of one run, but {len(run_dirs)} were given; give one RUN_DIR")
        runs = opened(run_dirs)
        if export is not None:
            from megatron_bapo.viewer.export import export as write_page

            written = write_page(runs[0].samples, export, step)
            typer.echo(f"{export} shows step {written}")
            return
        serve(runs, port, lambda url: typer.echo(f"Open {url}\nFigures: {url}run.html\nCtrl-C ends the viewer."))
