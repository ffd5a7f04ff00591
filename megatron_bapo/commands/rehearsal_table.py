"""Table of `rehearse`: what each rank has allocated and sent, beside the plan."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megatron_bapo.commands.rehearse import RankRehearsal, all_differences
from megatron_bapo.planning.hardware import GIB


def print_rehearsal(
    console: Console, world_size: int, rehearsals: Sequence[RankRehearsal], notes: Sequence[str]
) -> None:
    """Print one row per rank and kind of traffic, then the differences from the plan."""
    first = rehearsals[0]
    console.print(
        f"one update of {world_size} ranks, with {first.num_micro_batches} micro-batches of "
        f"{first.micro_batch_tokens:,} tokens each",
        soft_wrap=True,
    )
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    for name in ("rank", "stage", "what", "calls", "GiB", "planned", "difference"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    for played in rehearsals:
        peak = (played.peak_bytes, played.planned_peak_bytes)
        table.add_row(str(played.rank), str(played.stage), "peak memory", "", *_compared(*peak))
        for axis, planned in played.planned_traffic.items():
            calls = sum(part.num_calls for part in played.traffic if part.axis == axis)
            sent = _compared(played.sent_bytes[axis], planned)
            table.add_row("", "", f"{axis} traffic", f"{calls:,}", *sent)
    console.print(table)
    for difference in all_differences(rehearsals):
        console.print(difference, soft_wrap=True)


def _compared(found: int, planned: int) -> tuple[str, str, str]:
    return f"{found / GIB:,.2f}", f"{planned / GIB:,.2f}", f"{found / planned - 1:+.1%}"
