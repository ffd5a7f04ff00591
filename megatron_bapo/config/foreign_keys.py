"""Map from the keys of verl, NeMo-RL, slime, OpenRLHF and TRL to ours: the rows of foreign_keys.yaml."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_bapo.config.foreign_values import CONVERSIONS, Converted, Foreign

FILE = Path(__file__).with_name("foreign_keys.yaml")


@dataclass(frozen=True)
class ForeignRow:
    """One key of another project. The head of foreign_keys.yaml explains the fields."""

    project: str
    key: str
    ours: tuple[str, ...] = ()
    convert: str = "same"
    values: Mapping[Any, Any] | None = None
    with_key: str | None = None
    only: tuple[str, ...] = ()
    default: Any = None
    older: tuple[str, ...] = ()
    none: str | None = None
    idle: str | None = None
    neutral: tuple[Any, ...] = ()
    see: str | None = None
    note: str = ""

    @property
    def is_pattern(self) -> bool:
        return "**" in self.key

    @property
    def reason(self) -> str:
        """The reason why the key has no counterpart, or needs none."""
        return self.none or self.idle or ""

    def matches(self, key: str) -> bool:
        if self.key.endswith(".**"):
            return key.startswith(self.key[:-2])
        return key.endswith(self.key[2:]) if self.key.startswith("**.") else key in (self.key, *self.older)

    def converted(self, value: Any, known: Callable[[str], Any], other: Any = None) -> Converted:
        """Convert a value of this key. Raises NoCounterpart or ByHand."""
        choices = self.values or {}
        return CONVERSIONS[self.convert].convert(Foreign(value, self.ours, choices, other, self.note, known))


class Project(NamedTuple):
    title: str
    source: str
    prefix: str
    """Text before a key on the command line."""
    sections: tuple[str, ...]
    """Sections by which a configuration of this project is recognised."""
    always: Mapping[str, Any]
    """Values of our keys for which the project has no key."""
    unlike: Mapping[str, str]
    """Sections of files for a kind of training that has no counterpart here -> its name."""


@cache
def _data() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(FILE.read_text(encoding="utf-8"), Loader=loader)


@cache
def projects() -> dict[str, Project]:
    return {
        name: Project(
            title=about["title"],
            source=about["source"],
            prefix=about.get("prefix", ""),
            sections=tuple(about.get("sections", ())),
            always=about.get("always", {}),
            unlike=about.get("unlike", {}),
        )
        for name, about in _data()["projects"].items()
    }


def project_of(content: Mapping[str, Any]) -> str | None:
    """Return the project whose configuration this is, by its sections."""
    return next((name for name, about in projects().items() if not content.keys().isdisjoint(about.sections)), None)


@cache
def rows(project: str) -> tuple[ForeignRow, ...]:
    """Return a project's rows in the order of the file."""
    return tuple(_row(project, key, content) for key, content in _data()["keys"][project].items())


def _row(project: str, key: str, content: str | dict[str, Any]) -> ForeignRow:
    fields: dict[str, Any] = {"ours": content} if isinstance(content, str) else dict(content)
    if "with" in fields:
        fields["with_key"] = fields.pop("with")
    reasons: dict[str, str] = _data()["reasons"]
    for kind in ("none", "idle"):
        if kind in fields:
            fields[kind] = reasons.get(fields[kind], fields[kind])
    for several in ("ours", "only", "older", "neutral"):
        given = fields.get(several, ())
        fields[several] = tuple(given) if isinstance(given, list | tuple) else (given,)
    return ForeignRow(project, key, **fields)


def methods() -> dict[str, dict[str, Any]]:
    """Return algorithms that are no value of algorithm.objective -> the keys that set them up."""
    return _data()["methods"]


@cache
def by_name(project: str) -> dict[str, ForeignRow]:
    return {name: row for row in rows(project) if not row.is_pattern for name in (row.key, *row.older)}


@cache
def _patterns(project: str) -> tuple[ForeignRow, ...]:
    """Return the rows with patterns, the longest first because they are the most specific."""
    patterns = [row for row in rows(project) if row.is_pattern]
    return tuple(sorted(patterns, key=lambda row: -len(row.key)))


def find(project: str, key: str) -> ForeignRow | None:
    """Return the row of a project's key."""
    exact = by_name(project).get(key)
    return exact or next((row for row in _patterns(project) if row.matches(key)), None)


def named(project: str, key: str) -> ForeignRow | None:
    """Return the row of a key that is written with - or _ between words; patterns are not considered."""
    return by_name(project).get(key) or by_name(project).get(key.replace("_", "-"))


def ending_in(project: str, name: str) -> list[ForeignRow]:
    """Return the rows of keys that end in a name, one for each meaning."""
    plain, found = f".{name}".replace("-", "_"), dict[Any, ForeignRow]()
    for each, row in by_name(project).items():
        if f".{each}".replace("-", "_").endswith(plain):
            found.setdefault((row.ours, row.reason), row)
    return list(found.values())


def flattened(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves below a dotted key; an empty mapping is a leaf."""
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from flattened(each, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value
