"""The command line. Heavy libraries are imported by the command that needs them, so that --help is instant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_bapo.config.arithmetic import batch_arithmetic
from megatron_bapo.config.checks import check_config
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.run_state import RunDirectory, check_resumable
from megatron_bapo.errors import RunError, UserError

USER_ERROR, RUN_ERROR, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    help="BAPO reinforcement learning for reasoning models, on Megatron-Core, vLLM and Ray.\n\n"
    "Start with [bold]doctor[/], look at a plan with [bold]train CONFIG --dry-run[/], then train.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def messages() -> Iterator[None]:
    """Turn the project's errors into one message and an exit code; anything else is our bug and keeps its trace."""
    try:
        yield
    except (UserError, RunError) as error:
        # echo and not rich: a value in brackets is no markup, and lines stay whole.
        typer.echo(f"{typer.style('error:', fg='red', bold=True)} {error}", err=True)
        raise typer.Exit(USER_ERROR if isinstance(error, UserError) else RUN_ERROR) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megatron-bapo {version('megatron-bapo')}")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del show_version


@app.command(
    epilog="Examples: [bold]train configs/quickstart.yaml --dry-run[/] prints the plan; "
    "[bold]train configs/quickstart.yaml seed=2 run_dir=runs/seed2 optimizer.lr=5e-5[/] varies it. "
    "Exit codes: 0 done, 1 a part of the run failed, 2 the input is wrong, 130 interrupted."
)
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration, e.g. configs/quickstart.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Dotted keys over the file's values, e.g. seed=2 optimizer.lr=2e-6; null brings a default back.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the plan, start nothing.")] = False,
) -> None:
    """Train, or continue a run directory that was interrupted from its last complete checkpoint.

    Ctrl-C saves and stops after the current step; a second Ctrl-C ends at once.
    """
    with messages():
        resolved = load_config(config, overrides or [])
        warnings = check_config(resolved)
        check_resumable(resolved, RunDirectory(resolved.run_dir))
        _print_plan(resolved, warnings)
        if dry_run:
            return
        from megatron_bapo.controller.launcher import run_training

        code = run_training(resolved)
    raise typer.Exit(code)


@app.command(epilog="Example: [bold]plan configs/quickstart.yaml --weights[/] shows what every weight sync will move.")
def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration, e.g. configs/quickstart.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Dotted keys over the file's values.", show_default=False),
    ] = None,
    weights: Annotated[bool, typer.Option("--weights", help="The weight sync: bytes per link, memory, time.")] = False,
    ranks_per_host: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each host; by default all on one.", show_default=False)
    ] = None,
    colocated: Annotated[bool, typer.Option("--colocated", help="Engines on the trainer's hosts.")] = False,
    network_gbit_s: Annotated[float, typer.Option(min=0.001, help="Of each host, in each direction.")] = 400.0,
    memory_gb_s: Annotated[float, typer.Option(min=0.001, help="Copies into a host's shared memory.")] = 10.0,
) -> None:
    """Print what a configuration will do before it runs anywhere; needs no GPU."""
    with messages():
        resolved = load_config(config, overrides or [])
        _print_plan(resolved, check_config(resolved))
        if weights:
            from megatron_bapo.controller.weight_plan_tables import print_weight_plan

            bandwidth = {"network_gbit_s": network_gbit_s, "memory_gb_s": memory_gb_s}
            print_weight_plan(Console(), resolved, ranks_per_host, colocated=colocated, **bandwidth)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, e.g. runs/quickstart.")],
) -> None:
    """Write RUN_DIR/report.html anew from the run's metrics, also while it is running."""
    with messages():
        from megatron_bapo.controller.run_report import write_run_report

        typer.echo(write_run_report(run_dir))


@app.command()
def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Also import the heavy packages, which takes a minute.")] = False,
) -> None:
    """Check this machine and environment, and say what to do about what is wrong. Exit code 1 on problems."""
    from megatron_bapo.controller.doctor import run_doctor

    raise typer.Exit(run_doctor(Console(), deep=deep))


def _print_plan(config: Config, warnings: Sequence[str]) -> None:
    console = Console()
    table = Table.grid(padding=(0, 3))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, explanation in [("run directory", str(config.run_dir)), *batch_arithmetic(config)]:
        table.add_row(name, Text(explanation))
    console.print(table)
    for warning in warnings:
        console.print(Text("warning: ", "yellow").append(warning, "default"), soft_wrap=True)
