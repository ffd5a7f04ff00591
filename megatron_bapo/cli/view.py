"""The `view` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_bapo.cli.app import app, messages
from megatron_bapo.errors import UserError
from megatron_bapo.run_directory import RunDirectory


@app.command(
    epilog="Example: [bold]megatron-bapo view runs/quickstart[/]\n\n"
    "Exit codes: 0 done, 2 the folder has no sampled rollouts or the input is wrong."
)
def view(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, such as runs/quickstart.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: a free one.")] = 0,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a self-contained page of one step instead.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step for --export; default: the last one.")] = None,
) -> None:
    """Show the sampled rollouts of RUN_DIR in a browser, token by token.

    The page is served on this machine only, at a URL with a secret token.
    """
    with messages():
        from megatron_bapo.viewer.samples import Samples

        if step is not None and export is None:
            raise UserError("--step is for --export; add --export FILE, or choose the step on the page")
        samples = Samples(RunDirectory(run_dir))
        if export is not None:
            from megatron_bapo.viewer.export import export as write_page

            written = write_page(samples, export, step)
            typer.echo(f"{export} shows step {written}")
            return
        from megatron_bapo.viewer.server import serve

        serve(samples, port, lambda url: typer.echo(f"Open {url}\nCtrl-C ends the viewer."))
