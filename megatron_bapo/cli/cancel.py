"""The `cancel` command."""

from __future__ import annotations

from typing import Annotated

import typer

from megatron_bapo.cli.app import Job, app, messages


@app.command(
    epilog="Example: [bold]megatron-bapo cancel 4711[/]\n\n"
    "Exit codes: 0 done, 1 Slurm did not answer, 2 the job has ended, or Slurm does not know it."
)
def cancel(
    job: Job,
    now: Annotated[bool, typer.Option("--now", help="Stop the job without saving its state.")] = False,
) -> None:
    """Stop a Slurm job after it has saved its state. The same submit command continues the run."""
    from megatron_bapo.commands import submit as jobs

    with messages():
        typer.echo(jobs.cancel(job, now=now))
