"""Progress display of a run: live on a terminal, otherwise one plain line per step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from megatron_bapo.controller.terminal import terminal

_SPARK_WIDTH = 24
_STEPS_FOR_PACE = 10


class ProgressDisplay:
    """Context manager that shows the current activity, the steps done and left, and the latest metrics.

    A row's `step` counts the finished steps of its phase. Without a terminal, activities and every `line_every`-th step
    are printed as plain lines.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        num_warm_start_steps: int = 0,
        unit: str = "step",
        line_every: int = 1,
        console: Console | None = None,
    ) -> None:
        self._total_steps = {"train": total_steps, "warm_start": num_warm_start_steps}
        self._unit, self._line_every, self._next_line = unit, line_every, 0
        self._console = console or terminal()
        # isatty is checked, too, because with FORCE_COLOR rich treats a log file as a terminal.
        self._is_live = self._console.is_interactive and self._console.file.isatty()
        self._start = self._activity_start = time.monotonic()
        self._activity = "starting"
        # One spinner for all frames: a new one would restart its animation.
        self._spinner = Spinner("line" if self._console.options.ascii_only else "dots", style="cyan")
        self._row: Mapping[str, Any] | None = None
        self._times: list[float] = []
        self._rewards: list[float] = []
        self._validation: list[tuple[str, str]] = []
        self._announced: set[str] = set()
        self._warned: set[str] = set()
        self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def phase(self, activity: str) -> None:
        """Show what the run is doing now, e.g. "starting engines"; without a terminal each activity is printed once."""
        self._activity, self._activity_start = activity, time.monotonic()
        if not self._is_live and activity not in self._announced:
            self._announced.add(activity)
            self._print_line(activity)

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a `MetricsRow` of any phase."""
        if row["phase"] == "validation":
            self._validation = _validation_fields(row["metrics"])
            line = f"validation at step {row['step']}  {_plain(self._validation)}"
        else:
            is_new_phase = self._row is None or self._row["phase"] != row["phase"]
            is_restarted = self._row is not None and row["step"] <= self._row["step"]
            # The list is replaced, not changed in place, because the display's thread may be reading it.
            self._times = [*([] if is_new_phase or is_restarted else self._times[-_STEPS_FOR_PACE:]), row["time_s"]]
            self._row = row
            reward = _finite(row["metrics"].get("critic/score/mean"))
            self._rewards += [] if reward is None else [reward]
            line = f"{self._step_label()}  {_plain(_fields(row))}  {self._time_left()}"
            if not self._is_live and self._next_line > row["step"] >= self._next_line - self._line_every:
                return
            self._next_line = row["step"] + self._line_every
        if not self._is_live:
            self._print_line(line.rstrip())

    def warn(self, message: str) -> None:
        """Print a warning above the display, but only the first warning of each subject (its first word)."""
        subject = message.partition(" ")[0]
        if subject not in self._warned:
            self._warned.add(subject)
            self._console.print(Text.assemble(("warning: ", "yellow"), message), soft_wrap=True)

    def final_summary(
        self,
        *,
        accuracy_before: float | None,
        accuracy_after: float | None,
        seconds: float,
        paths: Mapping[str, Path],
    ) -> None:
        """Print held-out accuracies (fractions, None if not measured), the duration and the paths of results."""
        self._activity = ""
        self._live.stop()
        table = Table.grid(padding=(0, 3))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        arrow = "->" if self._console.options.ascii_only else "→"
        accuracy = Text.assemble(_percent(accuracy_before), f" {arrow} ", (_percent(accuracy_after), "bold green"))
        is_measured = accuracy_before is not None or accuracy_after is not None
        if is_measured:
            table.add_row("held-out accuracy", accuracy)
        table.add_row("time", _duration(seconds))
        for name, path in paths.items():
            table.add_row(name, Text(str(path)))
        if self._is_live:
            style = box.ASCII if self._console.options.ascii_only else box.ROUNDED
            self._console.print(Panel.fit(table, title="finished", title_align="left", border_style="dim", box=style))
        else:
            if is_measured:
                self._print_line(f"held-out accuracy {accuracy.plain}")
            self._print_line(f"time {_duration(seconds)}")
            for name, path in paths.items():
                self._print_line(f"{name} {path}")

    def _print_line(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _render(self) -> RenderableType:
        now = time.monotonic()
        lines: list[RenderableType] = []
        if self._activity:
            elapsed = f"  {_duration(now - self._activity_start)}"
            self._spinner.text = Text.assemble(self._activity, (elapsed, "dim"))
            lines.append(self._spinner)
        if self._row is not None:
            lines += [self._bar(self._row, now - self._start), _metrics_table(_fields(self._row))]
        if len(self._rewards) > 1 and not self._console.options.ascii_only:
            lines.append(Text.assemble(("reward so far  ", "dim"), (sparkline(self._rewards, _SPARK_WIDTH), "green")))
        if self._validation:
            lines.append(Text.assemble(("held out  ", "dim"), _plain(self._validation)))
        return Group(*lines)

    def _bar(self, row: Mapping[str, Any], elapsed_s: float) -> RenderableType:
        total = self._total_steps[row["phase"]]
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_row(
            Text(self._step_label(), style="bold"),
            ProgressBar(total=total, completed=row["step"], width=min(40, self._console.width // 3)),
            Text(self._time_left(), style="cyan"),
            Text(f"{_duration(elapsed_s)} so far", style="dim"),
        )
        return line

    def _step_label(self) -> str:
        assert self._row is not None
        name = "warm start" if self._row["phase"] == "warm_start" else self._unit
        return f"{name} {self._row['step']}/{self._total_steps[self._row['phase']]}"

    def _time_left(self) -> str:
        """Estimate the time left from the mean duration of the latest steps, including evaluations and checkpoints."""
        assert self._row is not None
        times, num_left = self._times, self._total_steps[self._row["phase"]] - self._row["step"]
        if len(times) < 2 or num_left <= 0:
            return ""
        return f"{_duration(num_left * (times[-1] - times[0]) / (len(times) - 1))} left"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as block characters, averaged down to at most `width` characters."""
    num_buckets = min(width, len(values))
    edges = [len(values) * index // num_buckets for index in range(num_buckets + 1)]
    means = [math.fsum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / span) if span else 0] for mean in means)


def _fields(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and values of the main metrics; missing and null metrics are left out."""
    metrics = row["metrics"]
    if row["phase"] == "warm_start":
        wanted = [("loss", "actor/loss", ".3f"), ("grad norm", "actor/grad_norm", ".2f")]
    else:
        wanted = [
            ("reward", "critic/score/mean", ".3f"),
            ("several turns", "num_turns/multi_turn_ratio", ".2f"),
            ("entropy", "actor/entropy", ".3f"),
            ("positive share", "actor/bapo_positive_share", ".2f"),
            ("teacher KL", "actor/teacher_kl", ".3f"),
            ("grad norm", "actor/grad_norm", ".2f"),
        ]
    fields = [
        (label, format(value, form))
        for label, name, form in wanted
        if (value := _finite(metrics.get(name))) is not None
    ]
    low, high = _finite(metrics.get("actor/bapo_clip_low")), _finite(metrics.get("actor/bapo_clip_high"))
    if low is not None and high is not None:
        fields.append(("clip", f"[{low:.2f}, {high:.2f}]"))
    throughput = _finite(metrics.get("perf/throughput"))
    if throughput is not None:
        fields.append(("tokens/s", f"{throughput:,.0f}"))
    return fields


def _validation_fields(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    values = ((name.removeprefix("val/"), _finite(value)) for name, value in metrics.items() if name.startswith("val/"))
    return [(name, f"{value:.3f}") for name, value in values if value is not None]


def _plain(fields: Sequence[tuple[str, str]]) -> str:
    return "  ".join(f"{label} {value}" for label, value in fields)


def _metrics_table(fields: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_row(*(Text(label, style="dim") for label, _ in fields))
    table.add_row(*(Text(value, style="bold") for _, value in fields))
    return table


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _percent(fraction: float | None) -> str:
    return "not measured" if fraction is None else f"{100 * fraction:.1f}%"


def _duration(seconds: float) -> str:
    """Format a duration as `42 s`, `3 min 05 s` or `2 h 07 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
