"""Output of the benchmarks: a table, and as the last line a JSON object for programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options. Its help prints the module's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def medians_s(
    tasks: Mapping[str, Callable[[], object]],
    *,
    num_repeats: int,
    num_warmups: int = 1,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each task. Repeats are interleaved, so that all tasks see the same machine load."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(num_warmups + num_repeats):
        for name, task in tasks.items():
            start = clock()
            task()
            if repeat >= num_warmups:
                times[name].append(clock() - start)
    return {name: median(values) for name, values in times.items()}


def report(
    name: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    ratios: dict[str, float],
    figures: dict[str, float],
) -> None:
    """Print the table and the JSON line. `ratios` compare within this run; `figures` depend on this machine."""
    table = Table(*columns, title=f"bench.{name}")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=120).print(table)
    print(json.dumps({"bench": name, "ratios": ratios, "figures": figures}))
