"""Terminal tables of an evaluation's results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_PROBLEMS = 64
"""Number of problems shown on the terminal; results.json has all of them."""
_WIDTH = 40


def print_results(console: Console, results: Mapping[str, Any]) -> None:
    """Print the estimates and their intervals for each data source, then the problems."""
    for source, found in results["sources"].items():
        console.print(_estimates(source, found))
        error = found["error_of_repeating"]
        console.print(
            Text(
                f"  {found['mean_tokens']:,.0f} tokens per response, {_percent(found['truncated'])} cut at the length "
                f"limit, mean score {found['mean_score']:.3f}, {found['reward_timeouts']} reward timeouts"
                + ("" if error is None else f"; new responses to these problems: +- {_percent(error)}"),
                "dim",
            ),
            soft_wrap=True,
        )
    console.print(Text(f"intervals: {results['interval']}", "dim"), soft_wrap=True)
    problems = results["problems"]
    console.print(_problems(problems[:MAX_PROBLEMS]))
    if len(problems) > MAX_PROBLEMS:
        console.print(Text(f"and {len(problems) - MAX_PROBLEMS} more problems", "dim"))


def _estimates(source: str, found: Mapping[str, Any]) -> Table:
    title = f"{source}: {found['num_problems']} problems, {found['num_responses']} responses"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("metric")
    for name in ("value", "95% interval", "standard error"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, estimate in found["metrics"].items():
        error = "" if estimate["standard_error"] is None else _percent(estimate["standard_error"])
        interval = f"{_percent(estimate['low'])} to {_percent(estimate['high'])}"
        table.add_row(name, _percent(estimate["value"]), interval, error)
    return table


def _problems(problems: list[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name, justify in (("problem", "right"), ("data source", "left"), ("right", "right"), ("tokens", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    for name in ("most frequent answer", "ground truth"):
        table.add_column(name, overflow="fold")
    for row in problems:
        majority = "" if row["majority"] is None else f"{_short(row['majority'])} ({row['num_majority']})"
        table.add_row(
            str(row["problem"]),
            Text(row["data_source"]),
            f"{row['num_right']}/{row['num_responses']}",
            f"{row['mean_tokens']:,.0f}",
            Text(majority),
            Text(_short(row["ground_truth"])),
        )
    return table


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"
