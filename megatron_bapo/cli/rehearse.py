"""The `rehearse` command."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from megatron_bapo.cli.app import ConfigFile, Overrides, app, messages
from megatron_bapo.cli.foreign_options import KeyCommand
from megatron_bapo.config.checks import check_planned
from megatron_bapo.config.loading import load_config
from megatron_bapo.controller.terminal import terminal
from megatron_bapo.errors import RUN_ERROR
from megatron_bapo.planning.known_models import architecture_of, teacher_of


@app.command(
    cls=KeyCommand,
    epilog="Play one update on the first, a middle and the last pipeline stage of 64 GPUs:\n"
    "[bold]megatron-bapo rehearse configs/recipes/qwen2.5-32b_64gpus.yaml[/]\n\n"
    "Try another layout on two ranks:\n"
    "[bold]megatron-bapo rehearse configs/recipes/qwen2.5-32b_64gpus.yaml \\\n"
    "    parallel.tensor_model_parallel_size=8 --rank 0 --rank 63[/]\n\n"
    "Exit codes: 0 it agrees with the plan, 1 it fails or differs, 2 the input is wrong.",
)
def rehearse(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            "--rank",
            help="Rank to play; may be repeated. Default: the first of the first, a middle and the last stage.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes and counts for programs.")] = False,
) -> None:
    """Play one update of CONFIG at full size without GPUs, weights or other ranks.

    The trainer's own code runs on tensors without data. What a rank allocates
    and sends is compared with the plan.
    """
    with messages():
        resolved = load_config(config, overrides or [])
        architecture, where = architecture_of(resolved.model)
        check_planned(resolved, architecture, where, teacher_of(resolved))
        from megatron_bapo.commands.rehearsal_table import print_rehearsal
        from megatron_bapo.commands.rehearse import all_differences, rehearse_ranks, rehearsed_config, stage_ranks

        played, notes = rehearsed_config(resolved)
        found = rehearse_ranks(played, architecture, ranks or stage_ranks(played))
        if as_json:
            typer.echo(json.dumps([asdict(each) for each in found]))
        else:
            print_rehearsal(terminal(), resolved.parallel.world_size, found, notes)
    raise typer.Exit(RUN_ERROR if all_differences(found) else 0)
