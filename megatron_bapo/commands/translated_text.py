"""Text of a translation: the configuration file and the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron_bapo.commands.foreign_files import MISSING
from megatron_bapo.commands.translate import LeftOut, Translation
from megatron_bapo.config.foreign_hints import shown
from megatron_bapo.config.loading import dotted_keys
from megatron_bapo.config.schema import Config

MAX_WIDTH = 120
MAX_OF_A_GROUP = 4
"""Largest number of keys of one pattern that are listed one by one."""


def config_text(result: Translation) -> str:
    """Return the YAML file, with keys in the order of the schema."""
    ordered = [key for key in dotted_keys(Config) if key in result.config]
    left = " ??? is still to be set." if MISSING in result.config.values() else ""
    lines = [f"# Translated from {result.title}'s {result.path.name} by `megatron-bapo translate`.{left}"]
    open_sections: list[str] = []
    for key in ordered:
        *sections, name = key.split(".")
        shared = next((i for i, (a, b) in enumerate(zip(sections, open_sections, strict=False)) if a != b), None)
        depth = min(len(sections), len(open_sections)) if shared is None else shared
        for level, section in list(enumerate(sections))[depth:]:
            lines += [""] * (level == 0) + [f"{'  ' * level}{section}:"]
        open_sections = sections
        lines += _lines(name, result.config[key], result.comments.get(key, ""), "  " * len(sections))
    return "\n".join([*lines, ""])


def _lines(name: str, value: Any, comment: str, indent: str) -> Iterator[str]:
    line = f"{indent}{name}: {value if value == MISSING else shown(value)}"
    if comment and len(line) + len(comment) + 4 > MAX_WIDTH:
        yield f"{indent}# {comment}"
    yield f"{line}  # {comment}" if comment and len(line) + len(comment) + 4 <= MAX_WIDTH else line


def report_lines(result: Translation, *, with_idle: bool = False) -> Iterator[str]:
    """Yield the report for stderr; `with_idle` adds the keys that need no translation."""
    hidden = "" if with_idle else " (--all lists them)"
    yield (
        f"{result.path} is {result.title}'s: {result.num_translated} keys translated, {len(result.without)} without a "
        f"counterpart, {len(result.idle)} not needed here{hidden}, {len(result.unknown)} not known to this translator"
    )
    yield from _part(
        "Still to be set or checked (??? in the result):", (f"{key}: {why}" for key, why in result.to_set.items())
    )
    yield from _part("Converted:", result.converted)
    yield from _part("Without a counterpart here:", _by_reason(result.without))
    yield from _part("Not resolved, so not translated; write the values out:", result.unresolved)
    yield from _part("Not known to this translator:", result.unknown)
    yield from _part("Not read:", result.notes)
    yield from _part("Not needed here:", _by_reason(result.idle) if with_idle else ())
    yield from _part("The result breaks these rules; change it before `train`:", result.broken_rules)


def _part(title: str, lines: Iterable[str]) -> Iterator[str]:
    found = [f"  {line}" for line in lines]
    if found:
        yield from ("", title, *found)


def _by_reason(left_out: Iterable[LeftOut]) -> Iterator[str]:
    """Yield one line per reason; many keys of one pattern are counted instead of listed."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for setting, reason, group in left_out:
        reasons.setdefault(reason, {}).setdefault(group or setting, []).append(setting)
    for reason, groups in reasons.items():
        listed = (
            f"{group} ({len(settings)} keys)" if len(settings) > MAX_OF_A_GROUP else ", ".join(settings)
            for group, settings in groups.items()
        )
        yield f"{', '.join(listed)}: {reason}" if reason else ", ".join(listed)
