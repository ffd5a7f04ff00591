"""The `eval` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_bapo.cli.app import Overrides, app, messages
from megatron_bapo.config.evaluation import EvalConfig
from megatron_bapo.config.loading import load_section
from megatron_bapo.garbage_collection import collector_paused

EvalFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file of an evaluation, such as configs/eval/paper.yaml.")
]


@app.command(
    "eval",
    epilog="Evaluate a Hugging Face folder:\n"
    "[bold]megatron-bapo eval configs/eval/paper.yaml \\\n"
    "    model.path=models/MODEL run_dir=runs/eval/MODEL[/]\n\n"
    "Evaluate the newest checkpoint of a run:\n"
    "[bold]megatron-bapo eval configs/eval/paper.yaml \\\n"
    "    model.path=runs/RUN run_dir=runs/eval/RUN[/]\n\n"
    "Exit codes: 0 done, 1 a part of the evaluation failed, 2 the input is wrong, 130 interrupted.",
)
def evaluate(
    config: EvalFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check model, problems and settings without starting anything.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print results.json to stdout; progress goes to stderr.")
    ] = False,
) -> None:
    """Evaluate a model: mean@n, pass@k and maj@k on problems with known answers, with 95% intervals.

    The model is a Hugging Face folder, or a checkpoint, which is converted
    first. Responses are saved as they finish: after Ctrl-C or a crash the
    same command continues, and a higher evaluation.n adds responses.
    """
    with messages():
        resolved = load_section(EvalConfig, config, overrides or [])
        with collector_paused():
            from megatron_bapo.commands.eval import run_benchmark

        code = run_benchmark(resolved, dry_run=dry_run, as_json=as_json)
    raise typer.Exit(code)
