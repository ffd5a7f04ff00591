"""The `submit` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_bapo.cli.app import ConfigFile, Overrides, app, messages
from megatron_bapo.cli.foreign_options import KeyCommand
from megatron_bapo.cli.run_plan import print_run_plan
from megatron_bapo.config.checks import check_config
from megatron_bapo.config.cluster import load_cluster
from megatron_bapo.config.loading import load_config
from megatron_bapo.controller.run_state import check_resumable
from megatron_bapo.run_directory import RunDirectory

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"


@app.command(
    cls=KeyCommand,
    epilog="Print the job without submitting it:\n"
    "[bold]megatron-bapo submit configs/recipes/qwen2.5-32b_16gpus.yaml --dry-run[/]\n\n"
    "Queue it on the nodes of configs/clusters/h100.yaml:\n"
    "[bold]megatron-bapo submit configs/recipes/qwen2.5-32b_16gpus.yaml --cluster h100[/]\n\n"
    "Exit codes: 0 done, 1 Slurm did not answer, 2 the input is wrong, the run does not fit or Slurm refused it.",
)
def submit(
    config: ConfigFile,
    overrides: Overrides = None,
    cluster: Annotated[
        str,
        typer.Option(metavar="NAME", help="Cluster of configs/clusters/NAME.yaml, or the path of such a file."),
    ] = "h100",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the configuration, but no files, and print the job.")
    ] = False,
) -> None:
    """Queue a training run with Slurm, after checking that it fits the cluster's GPUs.

    Before the time limit or a preemption the job saves its state and queues again.
    """
    from megatron_bapo.commands import submit as jobs

    with messages():
        resolved, target = load_config(config, overrides or []), load_cluster(cluster, CLUSTERS)
        warnings, notes = jobs.check_fits(resolved, target), ()
        check_resumable(resolved, RunDirectory(resolved.run_dir))
        if not dry_run and target.container is None:  # A container may have files and models at other paths.
            check_config(resolved)
            if target.python is None:  # Another interpreter may have other packages.
                from megatron_bapo.controller.preflight import check_inputs

                notes = check_inputs(resolved)
        job = jobs.submission(resolved, config, overrides or [], target)
        print_run_plan(resolved, warnings, notes)
        typer.echo(job.shown())
        if not dry_run:
            number = jobs.submit(job)
            typer.echo(
                f"submitted job {number}; see megatron-bapo status {number}, megatron-bapo logs {number} and "
                f"megatron-bapo cancel {number}"
            )
