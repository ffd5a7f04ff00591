"""Run a study: every arm at every number of updates per rollout batch with every seed, then its tables and figures.

python tools/study.py configs/studies/staleness.yaml --dry-run   # list the runs
python tools/study.py configs/studies/staleness.yaml --jobs 2    # execute unfinished runs, then collect and plot
python tools/study.py configs/studies/staleness.yaml --only-collect   # tables and figures of finished runs
python tools/study.py configs/studies/long_responses.yaml --quick     # repeat the main comparison

The YAML names a base configuration and overrides of it: those of all runs (`common`), those of the start run that each
seed's other runs start from (`start`), those of these other runs (`continued`), and those of each variant and arm. Each
run is `python -m megatron_bapo train` with its own run directory. Ctrl-C stops the runs after their current step. The
same command continues them and skips finished runs, which are those that the study's updates.csv has: a fresh clone
continues where the committed results end. `--quick` runs the part of the study under its key `quick` anew, in folders
of its own.

Exit codes: 0 done, 1 a run failed (the others were executed), 2 invalid input, 130 interrupted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_bapo.controller.terminal import terminal
from megatron_bapo.errors import exit_code
from megatron_bapo.studies.plan import StudyRun, check_runs, expand
from megatron_bapo.studies.results import collect
from megatron_bapo.studies.runs import run_all
from megatron_bapo.studies.study import load_study


def plan_table(runs: Sequence[StudyRun]) -> Table:
    table = Table(box=None, header_style="dim")
    for column in ("run", "steps x updates", "state"):
        table.add_column(column, no_wrap=True)
    for run in runs:
        done, trainer = run.num_updates_done(), run.config.trainer
        state = "finished" if run.finished else f"{done} of {run.num_updates} updates" if done else "not started"
        shape = f"{trainer.total_steps} x {trainer.updates_per_step}" if run.needs else f"{run.num_updates} supervised"
        table.add_row(run.name, shape, state)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="YAML of the study, e.g. configs/studies/staleness.yaml")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default 1)")
    parser.add_argument("--limit", type=int, metavar="N", help="stop after N runs (default: all)")
    parser.add_argument(
        "--quick", action="store_true", help="repeat the runs under the study's key `quick`, and no others"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the study and list its runs without starting any")
    parser.add_argument(
        "--only-collect", action="store_true", help="write tables and figures of finished runs without starting any"
    )
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}; give 1 or more")
    if arguments.limit is not None and arguments.limit < 1:
        parser.error(f"--limit is {arguments.limit}; give 1 or more")
    return exit_code(lambda: _main(arguments, terminal()))


def _main(arguments: argparse.Namespace, console: Console) -> int:
    study = load_study(arguments.study)
    if arguments.quick:
        study = study.quick_study()
    runs = expand(study)
    check_runs(runs)
    if arguments.dry_run:
        console.print(plan_table(runs))
        return 0
    failed = [] if arguments.only_collect else run_all(runs, arguments.jobs, console, arguments.limit)
    collect(study, runs, console)
    if failed:
        names = ", ".join(run.name for run in failed)
        console.print(f"{len(failed)} runs failed or need a run that failed: {names}; the same command retries them")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
