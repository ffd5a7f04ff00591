"""The `plan` command."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megatron_bapo.cli.app import ConfigFile, Overrides, app, messages
from megatron_bapo.cli.foreign_options import KeyCommand
from megatron_bapo.cli.run_plan import print_warnings
from megatron_bapo.config.checks import check_planned
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.terminal import terminal
from megatron_bapo.errors import USER_ERROR, UserError
from megatron_bapo.planning.advice import advice, plan_warnings
from megatron_bapo.planning.hardware import Assumptions, GpuName
from megatron_bapo.planning.known_models import architecture_of, teacher_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.rendering import as_data, print_plan, print_search
from megatron_bapo.planning.search import NEAR_BEST, check_searched, search
from megatron_bapo.planning.settings import Placement, changes, with_placement

_SEARCH, _WEIGHTS, _ASSUMPTIONS = "Search for layouts", "Weight sync", "Assumptions"

Efficiency = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Part of the peak FLOP/s that the trainer's matrix products reach.",
        rich_help_panel=_ASSUMPTIONS,
    ),
]
MeanResponse = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Mean response length as a fraction of the longest.",
        rich_help_panel=_ASSUMPTIONS,
    ),
]
HostGib = Annotated[float, typer.Option(min=1.0, help="Host memory of a node.", rich_help_panel=_ASSUMPTIONS)]
RanksPerHost = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Trainer ranks per host; default: all on one host.",
        show_default=False,
        rich_help_panel=_WEIGHTS,
    ),
]
NetworkGbitS = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        help="Network of each host, or with transport nccl of each GPU, in each direction; default: one adapter of "
        "--gpu's nodes.",
        show_default=False,
        rich_help_panel=_WEIGHTS,
    ),
]
NumGpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="GPUs to use; default: those of CONFIG.",
        show_default=False,
        rich_help_panel=_SEARCH,
    ),
]
Ranked = Annotated[
    bool,
    typer.Option(
        "--search",
        help=f"Rank the layouts that fit: by step time, but within {NEAR_BEST:.0%} of the best by free GPU memory, "
        "then by fewer parallel dimensions.",
        rich_help_panel=_SEARCH,
    ),
]
Weights = Annotated[
    bool,
    typer.Option(
        "--weights", help="Print the weight sync's bytes per link, memory and time.", rich_help_panel=_WEIGHTS
    ),
]


@app.command(
    cls=KeyCommand,
    epilog="Does a recipe fit on H200, and how long does a step take?\n"
    "[bold]megatron-bapo plan configs/recipes/qwen2.5-7b_8gpus.yaml --gpu H200[/]\n\n"
    "Try a change:\n"
    "[bold]megatron-bapo plan configs/recipes/qwen2.5-7b_8gpus.yaml \\\n"
    "    parallel.tensor_model_parallel_size=4[/]\n\n"
    "Plan another model, by its id on the Hugging Face Hub:\n"
    "[bold]megatron-bapo plan configs/recipes/qwen2.5-7b_8gpus.yaml \\\n"
    "    model.path=Qwen/Qwen2.5-7B-Instruct[/]\n\n"
    "Rank the layouts that fit on 32 GPUs:\n"
    "[bold]megatron-bapo plan configs/recipes/qwen2.5-7b_8gpus.yaml \\\n"
    "    --search --num-gpus 32[/]\n\n"
    "Exit codes: 0 it fits, 2 it does not fit or the input is wrong; the message names the keys to change.",
)
def plan(
    context: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[GpuName, typer.Option(help="Type of GPU, in nodes of eight.", case_sensitive=False)] = "H100",
    placement: Annotated[
        Placement | None,
        typer.Option(
            help="Short for the overrides that place engines on the trainer's GPUs or on GPUs of their own; they are "
            "printed. Default: as rollout.colocate says.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes, seconds and counts for programs.")] = False,
    ranked: Ranked = False,
    num_gpus: NumGpus = None,
    efficiency: Efficiency = Assumptions.compute_efficiency,
    mean_response: MeanResponse = Assumptions.mean_response_fraction,
    host_gib: HostGib = Assumptions.host_memory_gib,
    weights: Weights = False,
    ranks_per_host: RanksPerHost = None,
    network_gbit_s: NetworkGbitS = None,
) -> None:
    """Estimate memory and step time of CONFIG without a GPU, and say whether it fits.

    Only the model's config.json is read; about forty published models are
    known by the name of their folder or their Hub id. Without --search and
    --weights, the memory of every pipeline stage, engine and host is shown.
    """
    with messages():
        _check_plan_options(context, ranked=ranked, weights=weights, as_json=as_json)
        given = load_config(config, overrides or [])
        resolved = given if placement is None else with_placement(given, placement)
        architecture, where = architecture_of(resolved.model)
        assumptions = Assumptions(
            compute_efficiency=efficiency,
            fp8_efficiency=efficiency,
            mean_response_fraction=mean_response,
            host_memory_gib=host_gib,
        )
        planned = Plan(resolved, architecture, gpu, assumptions)
        if weights:
            from megatron_bapo.commands.weight_plan_tables import print_weight_plan

            check_planned(resolved, architecture, where, teacher_of(resolved))
            print_weight_plan(terminal(), planned, ranks_per_host, network_gbit_s)
            return
        if ranked:
            fits = _print_search(given, planned, num_gpus or planned.num_gpus, as_json=as_json)
        else:
            fits = _print_memory_and_time(given, planned, where, as_json=as_json)
    raise typer.Exit(0 if fits else USER_ERROR)


def _check_plan_options(context: typer.Context, *, ranked: bool, weights: bool, as_json: bool) -> None:
    """Raise UserError for options that would have no effect."""
    if weights and (ranked or as_json):
        raise UserError("--weights prints tables of one layout; leave out --search and --json")
    needed = {"num_gpus": ("--search", ranked)} | dict.fromkeys(
        ("ranks_per_host", "network_gbit_s"), ("--weights", weights)
    )
    for name, (option, given) in needed.items():
        source = context.get_parameter_source(name)
        if not given and source is not None and source.name == "COMMANDLINE":
            raise UserError(f"--{name.replace('_', '-')} is for {option}; add {option}, or leave it out")


def _print_search(given: Config, plan: Plan, num_gpus: int, *, as_json: bool) -> bool:
    with terminal(stderr=True).status("searching for layouts"):
        found = search(plan, num_gpus)
    if not found:
        check_searched(plan, num_gpus)
    if as_json:
        typer.echo(json.dumps([as_data(each, changes(given, each.config)) for each in found]))
    else:
        print_search(terminal(), plan, found, num_gpus, changes(given, found[0].config) if found else [])
    return bool(found)


def _print_memory_and_time(given: Config, plan: Plan, where: str, *, as_json: bool) -> bool:
    warnings = check_planned(plan.config, plan.architecture, where, teacher_of(plan.config))
    warnings += plan_warnings(plan)
    fitting = plan if plan.fits else advice(plan)
    would_fit = [] if fitting is None else changes(given, fitting.config)
    if as_json:
        typer.echo(json.dumps(as_data(plan, would_fit)))
    else:
        print_plan(terminal(), plan, where, would_fit)
        print_warnings(warnings)
    return plan.fits
