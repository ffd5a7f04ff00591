"""Reading of verl's and NeMo-RL's configuration files, with defaults lists, overrides and ${...} references.

Nothing is executed and no environment variable is read. Only files that a defaults list names are opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_bapo.config.foreign_keys import flattened
from megatron_bapo.config.yaml_text import UniqueKeyLoader, parse_yaml
from megatron_bapo.errors import UserError

DEFAULTS, SELF, OVERRIDE, MISSING = "defaults", "_self_", "override ", "???"
PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
MAX_DEPTH = 20


class _Loader(UniqueKeyLoader):
    """Reads 1e-6 as a number, as OmegaConf does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


@dataclass
class ForeignFile:
    """Content of a file with its defaults list and overrides applied; references are not resolved yet."""

    content: dict[str, Any]
    own: set[str] = field(default_factory=set)
    """Dotted keys that the file itself or an override gives, and not only a file of its defaults list."""
    notes: list[str] = field(default_factory=list)
    """One line for each file of a defaults list that could not be read."""


def read_foreign(path: Path, overrides: Sequence[str]) -> ForeignFile:
    """Read a file with its defaults list and overrides. Raises UserError for what cannot be read."""
    if path.suffix == ".sh":
        raise UserError(
            f"{path} is a script, which is not run. Options of slime, OpenRLHF and TRL are in "
            "docs/guides/coming_from.md. For verl, add `--cfg job > full.yaml` to its command, which then writes the "
            "whole configuration, or give the YAML file that the command names (--config-name, by default "
            "ppo_trainer.yaml) and its KEY=VALUE arguments"
        )
    given = dict(map(_parsed_override, overrides))
    groups = {
        group: str(value)
        for key, value in given.items()
        if "." not in (group := _group(key)) and isinstance(value, str)
    }
    file = ForeignFile({})
    reader = _Reader(path.parent, groups, file)
    file.content = reader.read(path, "", ())
    for key, value in given.items():
        if _group(key) not in reader.used_groups:
            place(file.content, key.split("."), value)
            file.own.update(name for name, _ in flattened(value, key))
    return file


def _parsed_override(override: str) -> tuple[str, Any]:
    """Parse an override of Hydra's command line: key=value, +key=value, ++key=value or ~key."""
    key, equals, text = override.lstrip("+").partition("=")
    if override.startswith("~"):
        return key.removeprefix("~"), None
    if not equals or not all(key.split(".")):
        raise UserError(
            f"override {override!r} must be KEY=VALUE with a key of the other project, such as "
            "actor_rollout_ref.rollout.n=16"
        )
    return key, parse_yaml(text, f"override {override!r}", _Loader)


def _group(key: str) -> str:
    """Return the config group of an override GROUP=NAME or GROUP@PACKAGE=NAME."""
    return key.partition("@")[0]


def place(content: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        below = content.get(part)
        content[part] = dict(below) if isinstance(below, Mapping) else {}
        content = content[part]
    old = content.get(parts[-1])
    content[parts[-1]] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value


def _merged(base: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """Merge as OmegaConf does; NeMo-RL's `_override_: true` replaces a section instead."""
    merged = dict(base)
    for key, value in child.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not value.get("_override_"):
            merged[key] = _merged(old, value)
        elif not (value == MISSING and old is not None):
            merged[key] = {k: v for k, v in value.items() if k != "_override_"} if isinstance(value, dict) else value
    return merged


class _Reader:
    """Reads a file and those of its defaults list: Hydra's groups, or NeMo-RL's paths."""

    def __init__(self, root: Path, groups: dict[str, str], file: ForeignFile) -> None:
        self.root, self.groups, self.file, self.notes = root, groups, file, file.notes
        self.used_groups: set[str] = set()
        self.search: list[Path] = []

    def read(self, path: Path, package: str, chain: tuple[Path, ...]) -> dict[str, Any]:
        """Return the file's content at its package, merged over the files of its defaults list."""
        if path in chain or len(chain) > MAX_DEPTH:
            raise UserError(f"defaults go in a circle: {' -> '.join(map(str, (*chain, path)))}; remove one of them")
        text = _text(path, chain)
        content = parse_yaml(text, str(path), _Loader)
        if content is None and chain:
            content = {}
        if not isinstance(content, dict):
            given = "nothing" if content is None else type(content).__name__
            raise UserError(
                f"{path} holds {given}, not a mapping of sections; give a configuration file of verl or NeMo-RL"
            )
        header = PACKAGE.search(text)
        package = {"_global_": ""}.get(header[1], header[1]) if header else package
        defaults = content.pop(DEFAULTS, None) or []
        self._note_search(path, content)
        own = _at(package, content)
        if not chain:
            self.file.own.update(name for name, _ in flattened(own, ""))
        merged, placed = {}, False
        entries = [defaults] if isinstance(defaults, str) else defaults
        self._choose(entries)
        for entry in entries:
            if entry == SELF:
                merged, placed = _merged(merged, own), True
            else:
                merged = _merged(merged, self._entry(entry, path, package, (*chain, path)))
        return merged if placed else _merged(merged, own)

    def _note_search(self, path: Path, content: Mapping[str, Any]) -> None:
        """Add the folders of Hydra's search path, which may be relative to any folder above the file.

        A package such as `pkg://verl.trainer.config` is the folder verl/trainer/config.
        """
        hydra = content.get("hydra")
        listed = hydra.get("searchpath", []) if isinstance(hydra, Mapping) else []
        for each in listed if isinstance(listed, list) else []:
            scheme, _, named = str(each).rpartition("://")
            relative = named.replace(".", "/") if scheme == "pkg" else named
            self.search += [parent / relative for parent in path.resolve().parents if (parent / relative).is_dir()][:1]

    def _choose(self, entries: Sequence[Any]) -> None:
        """Note the entries `override GROUP: NAME`; those of the outermost file take precedence."""
        for entry in entries:
            for left, name in entry.items() if isinstance(entry, dict) else ():
                if str(left).startswith(OVERRIDE):
                    self.groups.setdefault(str(left).split()[-1], str(name))

    def _entry(self, entry: Any, path: Path, package: str, chain: tuple[Path, ...]) -> dict[str, Any]:
        """Return the content that one entry of a defaults list names; {} and a note if there is no such file."""
        if isinstance(entry, str):
            name, has_package, at = entry.partition("@")
            group, at = "", ".".join(filter(None, (package, at))) if has_package else package
        elif isinstance(entry, dict) and len(entry) == 1:
            ((left, name),) = entry.items()
            if str(left).startswith(OVERRIDE):
                return {}
            group, _, at = str(left).split()[-1].partition("@")
            at = at or ("" if group.startswith("..") else group)
            at = ".".join(part for part in (package, at) if part) if chain[1:] else at
            if group in self.groups:
                name = self.groups[group]
                self.used_groups.add(group)
            self.groups.setdefault(group, str(name))
        else:
            self.notes.append(f"{path}: defaults entry {entry!r} is not understood; its keys are left out")
            return {}
        if name is None:
            return {}
        name = re.sub(r"\$\{(\w+)\}", lambda match: self.groups.get(match[1], match[0]), str(name))
        relative = Path(group) / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
        for folder in (path.parent, self.root, *self.search):
            if (folder / relative).is_file():
                return self.read((folder / relative).resolve(), at, chain)
        self.notes.append(f"{path}: defaults entry {name}: there is no {path.parent / relative}; its keys are left out")
        return {}


def _text(path: Path, chain: Sequence[Path]) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        named = f", which {chain[-1]} names" if chain else f"; relative paths start at {Path.cwd()}"
        raise UserError(f"cannot read {path}: {error.strerror}{named}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None


def _at(package: str, content: dict[str, Any]) -> dict[str, Any]:
    for part in reversed(package.split(".") if package else []):
        content = {part: content}
    return content


class Unresolved(str):
    """A text with a ${...} that the file cannot resolve."""


def resolved(content: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve plain references, oc.select and NeMo-RL's arithmetic; other texts become `Unresolved`."""
    resolver = _Resolver(content)
    return {key: resolver.value(value, (key,)) for key, value in content.items()}


class _Resolver:
    """Resolves the references of one content; `at` is the path of the value that is being resolved."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.open: list[str] = []

    def value(self, value: Any, at: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            return {key: self.value(each, (*at, str(key))) for key, each in value.items()}
        if isinstance(value, list):
            return [self.value(each, (*at, str(index))) for index, each in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return self._text(value, at)
        except LookupError:
            return Unresolved(value)

    def _text(self, text: str, at: tuple[str, ...]) -> Any:
        """Resolve one text. Raises LookupError for a reference that the file cannot resolve."""
        parts = list(_parts(text))
        values = [self._reference(inner, at) if is_reference else inner for is_reference, inner in parts]
        if len(parts) == 1:
            return values[0]
        if any(isinstance(value, dict | list) for value in values):
            raise LookupError(text)
        return "".join(map(str, values))

    def _reference(self, inner: str, at: tuple[str, ...]) -> Any:
        name, colon, arguments = inner.partition(":")
        if not colon:
            return self._lookup(inner.strip(), at)
        given = [argument.strip() for argument in _split(arguments)]
        if name == "oc.select":
            try:
                return self._lookup(given[0], at)
            except LookupError:
                if len(given) < 2:
                    return None
                return self._argument(given[1], at)
        if name in ("mul", "div", "add", "max") and len(given) == 2:
            return _arithmetic(name, *(self._argument(each, at) for each in given))
        raise LookupError(inner)

    def _argument(self, text: str, at: tuple[str, ...]) -> Any:
        return self._text(text, at) if "${" in text else yaml.load(text, Loader=_Loader)

    def _lookup(self, key: str, at: tuple[str, ...]) -> Any:
        dots = len(key) - len(key.lstrip("."))
        parts = (*at[: len(at) - dots], *key[dots:].split(".")) if dots else tuple(key.split("."))
        name = ".".join(parts)
        if name in self.open:
            raise LookupError(f"{name} refers to itself")
        found: Any = self.content
        for part in parts:
            if not isinstance(found, Mapping) or part not in found:
                raise LookupError(name)
            found = found[part]
        self.open.append(name)
        try:
            value = self.value(found, parts)
        finally:
            self.open.pop()
        if isinstance(value, Unresolved) or value == MISSING:
            raise LookupError(name)
        return value


def _arithmetic(name: str, left: Any, right: Any) -> Any:
    if not all(isinstance(value, int | float) for value in (left, right)) or (name == "div" and right == 0):
        raise LookupError(name)
    return {"mul": left * right, "add": left + right, "max": max(left, right)}.get(name, left / (right or 1))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the parts of a text: whether each is a reference, and its text without the braces."""
    start = 0
    while (begin := text.find("${", start)) >= 0:
        if begin > start:
            yield False, text[start:begin]
        end, depth = begin + 2, 1
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if depth:
            raise LookupError(text)
        yield True, text[begin + 2 : end - 1]
        start = end
    if start < len(text):
        yield False, text[start:]


def _split(text: str) -> list[str]:
    """Split a text at the commas outside of braces and brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts
