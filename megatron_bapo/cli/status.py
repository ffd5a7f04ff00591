"""The `status` command."""

from __future__ import annotations

import typer

from megatron_bapo.cli.app import Job, app, messages


@app.command(
    epilog="Example: [bold]megatron-bapo status 4711[/]\n\n"
    "Exit codes: 0 done, 1 Slurm did not answer, 2 Slurm does not know the job."
)
def status(job: Job) -> None:
    """Print the state of a Slurm job: state, nodes, times, exit code and log file."""
    from megatron_bapo.commands import submit as jobs

    with messages():
        for name, value in jobs.status(job).items():
            typer.echo(f"{name:12} {value}")
