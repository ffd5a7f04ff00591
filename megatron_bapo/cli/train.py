"""The `train` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from megatron_bapo.cli.app import ConfigFile, Overrides, app, messages
from megatron_bapo.cli.foreign_options import KeyCommand
from megatron_bapo.cli.run_plan import print_run_plan, print_text, print_warnings
from megatron_bapo.config.checks import check_config
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.run_state import check_resumable
from megatron_bapo.controller.terminal import activities
from megatron_bapo.errors import UserError
from megatron_bapo.garbage_collection import collector_paused
from megatron_bapo.run_directory import RunDirectory

_STARTS = "What is started"


@app.command(
    cls=KeyCommand,
    epilog="Check the quickstart, and show its plan, one prompt and the rewards of two responses:\n"
    "[bold]megatron-bapo train configs/quickstart.yaml --dry-run[/]\n\n"
    "Train it, in about five minutes on two CPU cores; the same command continues after an interruption:\n"
    "[bold]megatron-bapo train configs/quickstart.yaml[/]\n\n"
    "Train a variant in a run directory of its own:\n"
    "[bold]megatron-bapo train configs/quickstart.yaml seed=2 run_dir=runs/seed2[/]\n\n"
    "Train on recorded rollouts, without engines:\n"
    "[bold]megatron-bapo train configs/quickstart.yaml run_dir=runs/replay \\\n"
    "    --rollouts-from runs/recorded/rollouts[/]\n\n"
    "Exit codes: 0 done, 1 a part of the run failed, 2 the input is wrong, 130 interrupted, "
    "131 ended at once by a second signal.",
)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check all inputs; print the plan, one prompt, and the rewards of its ground truth and of an empty "
            "response; start nothing.",
            rich_help_panel=_STARTS,
        ),
    ] = False,
    rollouts_from: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Train on the recorded rollouts DIR/step-*.parquet; no engine is started.",
            rich_help_panel=_STARTS,
        ),
    ] = None,
    rollout_only: Annotated[
        bool,
        typer.Option(
            "--rollout-only",
            help="Record rollouts of the initial model; no trainer is started.",
            rich_help_panel=_STARTS,
        ),
    ] = False,
    num_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Run on the Ray cluster at RAY_ADDRESS once it has this many nodes; the scripts in launch/ start one.",
            rich_help_panel="Cluster",
        ),
    ] = None,
) -> None:
    """Train the model of CONFIG, or continue its run directory from the newest checkpoint.

    Ctrl-C saves the state and stops after the current step; a second Ctrl-C
    ends the run at once.
    """
    with messages():
        if rollouts_from is not None and rollout_only:
            raise UserError("--rollouts-from needs no engines and --rollout-only no trainer; give one of them")
        if rollout_only and num_nodes is not None:
            raise UserError("--rollout-only runs on one machine; leave out --num-nodes")
        resolved = load_config(config, overrides or [])
        warnings = check_config(resolved)
        check_resumable(resolved, RunDirectory(resolved.run_dir), rollout_only=rollout_only)
        if dry_run:
            _print_dry_run(resolved, warnings, rollouts_from, rollout_only=rollout_only)
            return
        print_run_plan(resolved, warnings)
        code = _run(resolved, rollouts_from, num_nodes, rollout_only=rollout_only)
    raise typer.Exit(code)


def _run(config: Config, rollouts_from: Path | None, num_nodes: int | None, *, rollout_only: bool) -> int:
    """Train, or record rollouts; returns the exit code."""
    if rollout_only:
        with collector_paused():
            from megatron_bapo.commands.rollout_only import run_rollouts

        return run_rollouts(config)
    if num_nodes is not None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # before Ray is loaded: it leaves the loopback
    with collector_paused():
        from megatron_bapo.controller.launcher import run_training

    return run_training(config, rollouts_from, num_nodes)


def _print_dry_run(config: Config, warnings: list[str], rollouts_from: Path | None, *, rollout_only: bool) -> None:
    with activities() as show:
        show("loading the checks")  # before imports that take a second
        from megatron_bapo.commands.dry_run import dry_run

        found = dry_run(config, rollouts_from, show, rollout_only=rollout_only)
    print_run_plan(config, [])
    print_text(found.prompt_title, found.prompt)
    for line in (*found.facts, *found.notes):
        typer.echo(line)
    print_warnings([*warnings, *found.warnings])
