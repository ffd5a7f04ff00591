"""Hints for keys, options and values of other projects. The module is imported only when one is unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import yaml

from megatron_bapo.config.foreign_keys import (
    ForeignRow,
    by_name,
    ending_in,
    find,
    flattened,
    methods,
    named,
    projects,
    rows,
)
from megatron_bapo.config.foreign_values import CONVERSIONS, ByHand, NoCounterpart

MAX_HINTS = 8
"""Largest number of hints about one unknown section; a longer section is better translated as a file."""
MAX_MEANINGS = 3
"""Largest number of keys that a short name may stand for; `enabled`, for example, stands for too many."""

Known = Callable[[str], Any]
"""Returns the value of one of our keys, or None where it has none."""


def key_hints(key: str, value: Any, keys: Sequence[str], *, in_section: bool, known: Known) -> dict[str, Any]:
    """Return hints about an unknown key that is another project's, or holds such keys: key -> (value, hint).

    `keys` are all dotted keys of the configuration at hand. `in_section`: the key stands in a section of ours, so that
    the last part of another project's key is enough. Empty where the key is nobody's.
    """
    leaves = list(flattened(value, key))
    otherwise = _section_hint(key)
    hints = {
        leaf: (each, hint)
        for leaf, each in leaves
        if (hint := _hint(leaf, each, keys, in_section and leaf == key, known) or otherwise)
    }
    if len(hints) < len(leaves) and len(hints) < MAX_HINTS:
        return {}
    first = dict(list(hints.items())[:MAX_HINTS])
    if len(leaves) > MAX_HINTS:
        rest = len(leaves) - MAX_HINTS
        first[key] = ({}, f"{rest} more keys below it; `megatron-bapo translate FILE` translates the file")
    return first


def with_given(leaves: Iterable[tuple[str, Any]], known: Known) -> Known:
    """Return `known` with the values that other projects' keys among the leaves give ours, such as rollout.n.

    So a batch that is given in prompts is converted by the responses per prompt that are given beside it.
    """
    given = dict[str, Any]()
    for key, value in leaves:
        for row in (named(project, key) for project in projects()):
            if row is not None and row.convert == "same" and len(row.ours) == 1 and row.values is None:
                given[row.ours[0]] = value
    return lambda key: given[key] if key in given else known(key)


def option_hint(option: str, value: Any, known: Known) -> str | None:
    """Return the hint about an unknown option of the command line, such as --rollout-batch-size."""
    name = option.lstrip("-")
    return _joined([row for project in projects() if (row := named(project, name))], name, value, known)


def value_hint(key: str, value: Any) -> str | None:
    """Return the hint about another project's value of one of our keys, such as algorithm.kl_loss_type=low_var_kl."""
    method = methods().get(str(value).lower().replace("++", "_plus_plus").replace("-", "_").replace(".", "_"))
    if key == "algorithm.objective" and method:
        return f"{value} is {_overrides(method)} here"
    for project, about in projects().items():
        for row in rows(project):
            choices = row.values or {}
            if key not in row.ours or not isinstance(value, str) or value not in choices:
                continue
            ours = choices[value]
            if ours is None:
                return f"{about.title}'s {value} is not here" + (f": {row.note}" if row.note else "")
            return f"{about.title}'s {value} is {_overrides(ours if isinstance(ours, Mapping) else {key: ours})} here"
    return None


def _hint(key: str, value: Any, keys: Sequence[str], in_section: bool, known: Known) -> str | None:
    """Return the hint about one key that holds a plain value."""
    section, _, name = key.rpartition(".")
    is_bare, is_ours = "." not in key, any(each.rpartition(".")[2] == name for each in keys)
    if name == "objective" and "algorithm.objective" in keys and (hint := value_hint("algorithm.objective", value)):
        return f"did you mean algorithm.objective? {hint}"
    if is_bare and is_ours:
        return None
    found = [row for project in projects() if (row := named(project, key))]
    found = found or [row for project in projects() for row in ending_in(project, key)]
    if key.partition(".")[0] not in keys:
        found = found or [row for project in projects() if (row := find(project, key))]
    if in_section and not is_ours and not found:
        found = [row for project in projects() for row in ending_in(project, name)]
        beside = [each for each in keys if each.startswith(f"{section}.")]
        if any({*name.split("_")} < {*each.rpartition(".")[2].split("_")} for each in beside):  # num_steps for steps
            found = [row for row in found if not set(row.ours).isdisjoint(beside)]
    return _joined([row for row in found if not row.ours or set(row.ours) & set(keys)], key, value, known)


def _section_hint(key: str) -> str | None:
    """Return the hint about a key that is not in the map, but in a section that only another project has."""
    section = key.partition(".")[0]
    title = next((about.title for about in projects().values() if section in about.sections), None)
    return title and f"{section} is a section of {title}; docs/guides/coming_from.md lists what its keys are here"


def _joined(found: Sequence[ForeignRow], key: str, value: Any, known: Known) -> str | None:
    """Join the hints of several rows; projects with the same hint are named together."""
    said: dict[str, list[str]] = {}
    for row in found:
        titles = said.setdefault(_said(row, key, value, known), [])
        titles.append(f"{projects()[row.project].title}'s")
    if not 0 < len(said) <= MAX_MEANINGS:
        return None
    return "; ".join(f"{' and '.join(dict.fromkeys(titles))} {text}" for text, titles in said.items())


def _said(row: ForeignRow, key: str, value: Any, known: Known) -> str:
    """Return what one row says: our key, and the override to paste where the value converts."""
    is_named = row.is_pattern or by_name(row.project).get(key) == row or key.replace("_", "-") == row.key
    theirs = key if is_named else row.key
    if not row.ours:
        return f"{theirs} {'has no counterpart' if row.none else 'is not needed'} here: {row.reason}"
    lead = f"{theirs} is {' and '.join(row.ours)} here"
    try:
        values, how, to_do = row.converted(value, known)
    except NoCounterpart as error:
        return f"{lead}; this value has no counterpart: {error}"
    except ByHand as error:
        return lead + _bracketed(CONVERSIONS[row.convert].words, row.note or str(error))
    lead += _bracketed(how, row.note, to_do)
    return f"{lead}: set {_overrides(values)}" if values else f"{lead}; leave it out for this value"


def _bracketed(*texts: str) -> str:
    given = [text.replace("`", "") for text in texts if text]
    return f" ({'; '.join(given)})" if given else ""


def _overrides(values: Mapping[str, Any]) -> str:
    """Return values as overrides of the command line."""
    return " ".join(f"{key}={shown(value)}" for key, value in values.items())


def shown(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()
