"""Print docs/guides/coming_from.md: the text of coming_from.md with tables of other projects' keys.

python tools/coming_from.py > docs/guides/coming_from.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_bapo.config.foreign_hints import shown
from megatron_bapo.config.foreign_keys import ForeignRow, methods, projects, rows
from megatron_bapo.config.foreign_values import CONVERSIONS

TEMPLATE = Path(__file__).with_suffix(".md")

SECTIONS = {
    "trainer": "Batches, steps and tokens",
    "model": "Model",
    "data": "Prompts",
    "reward": "Reward",
    "algorithm": "Algorithm",
    "optimizer": "Optimizer",
    "rollout": "Rollouts",
    "parallel": "Layout",
    "fp8": "FP8",
    "weight_sync": "Weight transfer",
    "evaluation": "Evaluation",
    "checkpoint": "Checkpoints",
    "logging": "Logging",
    "": "The run",
}
"""Our sections in the order of the page, with their titles."""


def page() -> str:
    lines = [f"| {name} | `{_overrides(keys)}` |" for name, keys in methods().items()]
    tables = {
        "{algorithms}": "\n".join(["| name | keys |", "| --- | --- |", *lines, ""]),
        "{projects}": "\n".join(part for name in projects() for part in _project(name)),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for placeholder, table in tables.items():
        text = text.replace(placeholder + "\n", table)
    return text


def _project(name: str) -> Iterator[str]:
    """Yield a project's tables: translated keys by our sections, then keys without a counterpart."""
    about = projects()[name]
    yield f"## From {about.title}\n\nThe keys are those of {about.source}.\n"
    tables: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for row in rows(name):
        if row.ours:
            section = row.ours[0].partition(".")[0] if "." in row.ours[0] else ""
            tables[section].append(_row(row))
    for section, title in SECTIONS.items():
        if tables[section]:
            header = f"| {about.title} | here | how the value converts |\n| --- | --- | --- |"
            heading = title if title.isupper() else title.lower()
            yield "\n".join([f"### {about.title}: {heading}", "", header, *tables[section], ""])
    yield from _without(name)


def _row(row: ForeignRow) -> str:
    ours = ", ".join(f"`{key}`" for key in row.ours)
    return f"| {_keys(row)} | {ours} | {_cell(_conversion(row))} |"


def _keys(row: ForeignRow) -> str:
    prefix = projects()[row.project].prefix
    older = f"; before: {', '.join(f'`{prefix}{key}`' for key in row.older)}" if row.older else ""
    return f"`{prefix}{row.key}`{older}"


def _conversion(row: ForeignRow) -> str:
    default = f"{projects()[row.project].title}'s default: `{shown(row.default)}`" if row.default is not None else ""
    parts = [CONVERSIONS[row.convert].words, *_choices(row), row.note, default]
    return "; ".join(part for part in parts if part)


def _choices(row: ForeignRow) -> Iterator[str]:
    """Yield the values that have another name here, and those without a counterpart."""
    values = row.values or {}
    for value, ours in values.items():
        if isinstance(ours, Mapping):
            yield f"`{shown(value)}`: `{_overrides(ours)}`" if ours else f"`{shown(value)}`: leave it out"
        elif ours is not None and shown(ours) != shown(value):
            yield f"`{shown(value)}`: `{shown(ours)}`"
    absent = [f"`{shown(value)}`" for value, ours in values.items() if ours is None]
    if absent:
        yield f"not here: {', '.join(absent)}"


def _without(name: str) -> Iterator[str]:
    about, reasons = projects()[name], dict[str, list[str]]()
    for row in rows(name):
        if row.none:
            reasons.setdefault(row.none, []).append(f"`{about.prefix}{row.key}`")
    lines = [f"| {', '.join(keys)} | {_cell(reason)} |" for reason, keys in reasons.items()]
    header = [
        f"### {about.title}: without a counterpart",
        "",
        "| keys | why, and what to do instead |",
        "| --- | --- |",
    ]
    yield "\n".join([*header, *lines, ""])


def _overrides(values: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={shown(value)}" for key, value in values.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(page(), end="")
