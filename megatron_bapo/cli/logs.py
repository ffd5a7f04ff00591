"""The `logs` command."""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_bapo.cli.app import Job, app, messages
from megatron_bapo.logs import last_lines


@app.command(
    epilog="Example: [bold]megatron-bapo logs 4711 --lines 100[/]\n\n"
    "Exit codes: 0 done, 1 Slurm did not answer, 2 Slurm does not know the job."
)
def logs(
    job: Job,
    num_lines: Annotated[int, typer.Option("--lines", min=1, help="Number of lines of each log.")] = 20,
) -> None:
    """Print the last lines of the logs of a Slurm job and of Ray on each of its nodes."""
    from megatron_bapo.commands import submit as jobs

    with messages():
        for path in jobs.logs(job):
            typer.echo(f"{path}:\n{last_lines(path, num_lines)}")
