"""Simulate how rollouts are scheduled, and name the fastest settings: `rollout.mode`, staleness and token budgets.

python tools/simulate_rollouts.py configs/recipes/paper_32b_64k.yaml --gpu H100   # before there is a run
python tools/simulate_rollouts.py configs/recipes/paper_32b_64k.yaml rollout.num_engines=4 trainer.train_batch_size=512
python tools/simulate_rollouts.py runs/small --and-run runs/large --overlapping-run runs/async   # from recorded runs

The scheduler is the one of real runs, on a virtual clock; engines and trainer are models that only take time. For a
configuration, their times are the ones that `plan` estimates, with the engines on GPUs of their own in every mode. For
a run directory, they are fitted to its requests.jsonl and metrics.jsonl: seconds of an engine step and of an update,
and the CPU cores that both keep busy. If both work at the same time and ask for more cores than there are, both slow
down; an asynchronous run shows by how much. Costs that the runs do not determine are listed.

A simulation takes minutes; progress goes to stderr. Exit codes: 0 done, 2 the input is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from megatron_bapo.config.loading import load_config
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.controller.terminal import terminal
from megatron_bapo.errors import UserError, exit_code
from megatron_bapo.planning.hardware import GPUS, Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.simulation.calibration import (
    doubts_of,
    overlapping_run,
    planned_workload,
    recorded_run,
    recorded_workload,
    with_overlap,
)
from megatron_bapo.simulation.engine_costs import EngineCosts
from megatron_bapo.simulation.simulator import Simulated, Workload, best, candidates, simulate


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a configuration, or the directory of a synchronous run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of the configuration")
    parser.add_argument(
        "--and-run", type=Path, action="append", default=[], metavar="RUN_DIR",
        help="with a run directory: another synchronous run with another batch size, to fit an engine's costs",
    )  # fmt: skip
    parser.add_argument(
        "--overlapping-run", type=Path, metavar="RUN_DIR",
        help="with a run directory: an asynchronous run, to fit how much engines and trainer slow each other down",
    )  # fmt: skip
    parser.add_argument("--gpu", type=str.upper, choices=[*GPUS], default="H100")
    parser.add_argument("--mean-response", type=float, help="tokens (default: a quarter of the longest response)")
    parser.add_argument("--sigma", type=float, default=1.0, help="sigma of the lognormal response lengths (default 1)")
    parser.add_argument("--steps", type=int, default=12, help="rollout batches that are measured (default 12)")
    parser.add_argument("--json", action="store_true", help="print results for programs")
    arguments = parser.parse_intermixed_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; give 1 or more")
    if not arguments.sigma > 0:
        parser.error(f"--sigma is {arguments.sigma}; give more than 0")
    return arguments


def workload_of(arguments: argparse.Namespace) -> tuple[RolloutConfig, Workload, EngineCosts | None]:
    """Return the settings to start from, the workload, and for a recorded run the fitted engine costs."""
    if arguments.source.is_dir():
        if arguments.overrides:
            raise UserError("a recorded run has its own configuration; leave out key=value")
        run, *others = map(recorded_run, [arguments.source, *arguments.and_run])
        workload, costs = recorded_workload(run, *others)
        if arguments.overlapping_run is not None:
            workload = with_overlap(workload, overlapping_run(arguments.overlapping_run))
        return run.config.rollout, workload, costs
    if arguments.and_run or arguments.overlapping_run is not None:
        raise UserError(
            f"--and-run and --overlapping-run go with the directory of a recorded run, and {arguments.source} is none; "
            "leave them out, or give such a directory"
        )
    config = load_config(arguments.source, arguments.overrides)
    architecture, _ = architecture_of(config.model)
    plan = Plan(config, architecture, arguments.gpu, Assumptions())
    mean = arguments.mean_response or config.rollout.max_response_length / 4
    return config.rollout, planned_workload(plan, mean_response=mean, sigma=arguments.sigma), None


def table(results: Mapping[str, Simulated], workload: Workload) -> Table:
    lengths = workload.lengths
    title = (
        f"{workload.num_engines} engines, {workload.groups_per_batch} prompts a step, responses of "
        f"{lengths.mean():,.0f} tokens, at most {lengths.max():,}; updates {workload.train_s:,.3g} s, new weights "
        f"{workload.engine.load_s:,.3g} s"
    )
    columns = (
        "steps/h",
        "tokens/s",
        "engines idle",
        "sequences",
        "trainer idle",
        "staleness",
        "most",
        "too old",
        "length",
    )
    table = Table(title=title, title_justify="left", box=None, header_style="dim")
    for column in ("settings", *columns):
        table.add_column(column, no_wrap=True)
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.steps_per_hour:,.4g}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.engine_idle:.0%}",
            f"{result.num_running:.1f}",
            f"{result.trainer_idle:.0%}",
            f"{result.staleness_mean:.2f}",
            f"{result.staleness_max:.0f}",
            f"{result.dropped_stale:.1%}",
            f"{result.response_length:,.0f}",
        )
    return table


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows on stderr what is simulated next: beside a bar on a terminal, else one line each."""
    console, positions = terminal(stderr=True), count()
    # isatty besides: FORCE_COLOR makes rich call a log file a terminal.
    if not (console.is_interactive and console.file.isatty()):
        yield lambda name: console.print(f"simulating {name} ({next(positions) + 1} of {total}) ...", soft_wrap=True)
        return
    text = TextColumn("simulating {task.description}", markup=False)
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, description=name, completed=next(positions))


def main() -> int:
    arguments = parsed()
    console = terminal(width=130, stderr=arguments.json)
    return exit_code(lambda: _main(arguments, console), after_stop="nothing was written")


def _main(arguments: argparse.Namespace, console: Console) -> int:
    settings, workload, costs = workload_of(arguments)
    tried, results = candidates(settings), dict[str, Simulated]()
    with progress(len(tried)) as show:
        for name, each in tried.items():
            show(name)
            results[name] = simulate(each, workload, num_steps=arguments.steps, num_first_steps=each.max_staleness + 1)
    fastest, doubts = best(results), [] if costs is None else doubts_of(costs, results)
    if arguments.json:
        data = {name: each.as_data() for name, each in results.items()}
        print(json.dumps({"best": fastest, "doubts": doubts, "settings": data}))
        return 0
    console.print(table(results, workload))
    for doubt in doubts:
        console.print(f"doubtful: {doubt}", soft_wrap=True)
    console.print(f"best: {fastest} (the least stale within 2% of the fastest)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
