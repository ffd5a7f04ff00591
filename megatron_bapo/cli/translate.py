"""The `translate` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_bapo.cli.app import app, messages
from megatron_bapo.errors import UserError
from megatron_bapo.files import unwritable

From = Literal["verl", "nemo-rl", "auto"]


@app.command(
    epilog="Translate a configuration of verl with the overrides of its run_*.sh:\n"
    "[bold]megatron-bapo translate ppo_megatron_trainer.yaml \\\n"
    "    actor_rollout_ref.rollout.n=16 --output mine.yaml[/]\n\n"
    "Translate a configuration of NeMo-RL with the files that it extends:\n"
    "[bold]megatron-bapo translate grpo_math_8B_megatron.yaml[/]\n\n"
    "Exit codes: 0 done, 2 the input is wrong.",
)
def translate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML configuration of verl or NeMo-RL.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Keys of that project over the file's values, as on its command line.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the configuration there instead of to stdout.")
    ] = None,
    source: Annotated[From, typer.Option("--from", help="Whose keys they are; by default as they look.")] = "auto",
    show_all: Annotated[
        bool, typer.Option("--all", help="Also list the keys that need no translation, with the reasons.")
    ] = False,
) -> None:
    """Translate a configuration of verl or NeMo-RL into this project's keys.

    The result goes to stdout or --output. What converts, what has no
    counterpart and what is still to be set goes to stderr.
    """
    with messages():
        from megatron_bapo.commands import translate as command
        from megatron_bapo.commands.translated_text import config_text, report_lines

        if output is not None and output.resolve() == file.resolve():
            raise UserError(f"--output {output} is the file that is translated; name another file")
        result = command.translate(file, overrides or [], source)
        if output is None:
            typer.echo(config_text(result), nl=False)
        else:
            try:
                output.write_text(config_text(result), encoding="utf-8")
            except OSError as error:
                raise unwritable(f"--output {output}", error) from None
        for line in report_lines(result, with_idle=show_all):
            typer.echo(line, err=True)
