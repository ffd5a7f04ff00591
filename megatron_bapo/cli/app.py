"""The Typer application and the parts that its commands share: arguments, messages and exit codes."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from megatron_bapo.controller.terminal import discard
from megatron_bapo.errors import INTERRUPTED, RunError, UserError, code_of
from megatron_bapo.files import storage_failure

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML configuration file, such as configs/quickstart.yaml.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values that override the file, such as seed=2 evaluation.n=8; null restores a default.",
        show_default=False,
    ),
]
Job = Annotated[str, typer.Argument(metavar="JOB", help="Number of the Slurm job, as printed by submit.")]

app = typer.Typer(
    help="Train reasoning models with BAPO on Megatron-Core, vLLM and Ray.\n\n"
    "Check the environment with [bold]megatron-bapo doctor[/], check that a configuration fits the GPUs with "
    "[bold]megatron-bapo plan CONFIG[/], then run [bold]megatron-bapo train CONFIG[/].",
    epilog="[bold]megatron-bapo COMMAND --help[/] has examples.\n\n"
    "Exit codes: 0 done, 1 a part of the run failed, 2 the input is wrong, 130 interrupted.",
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def messages() -> Iterator[None]:
    """Print warnings and the project's errors as messages with an exit code; any other error keeps its traceback."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            yield
    except (UserError, RunError) as error:
        _print_error(error)
        raise typer.Exit(code_of(error)) from None
    except OSError as error:
        failure = _denied(error) or storage_failure(error, Path.cwd())
        if failure is None:
            raise
        _print_error(failure)
        raise typer.Exit(code_of(failure)) from None
    except KeyboardInterrupt:
        _print("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def _print_warning(message: Warning | str, category: type[Warning], *_: object) -> None:
    _print(f"{typer.style('warning:', fg='yellow')} {message}")


def _denied(error: OSError) -> UserError | None:
    """Return the error for a file or folder that this user may not access, else None."""
    if not isinstance(error, PermissionError) or error.filename is None:
        return None
    return UserError(f"{error.filename}: {error.strerror}; choose another path, or ask its owner for access")


def _print_error(error: Exception) -> None:
    # echo instead of rich, which would read brackets as markup and wrap lines.
    _print(f"{typer.style('error:', fg='red', bold=True)} {error}")


def _print(message: str) -> None:
    """Print a message on stderr. That its terminal is gone neither ends a run nor changes its exit code."""
    try:
        typer.echo(message, err=True)
    except OSError:
        discard(sys.stderr)


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
