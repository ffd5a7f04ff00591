"""From YAML and command-line overrides to a Config, and back.

Every problem of a configuration is reported at once: key, value, rule. Relative paths inside a configuration are
relative to the working directory; `extends` is relative to the file that it stands in.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe subset; a key that stands twice in one mapping is an error instead of a silent override."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                mark = key_node.start_mark
                raise UserError(f"{mark.name}:{mark.line + 1}: the key {key!r} stands twice; remove one")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a file with its `extends` chain, apply `dotted.key=value` overrides, and validate.

    Raises UserError that lists every problem.
    """
    tree = _read_tree(path, ())
    for override in overrides:
        _apply(tree, override)
    unknown = list(_unknown_keys(tree, Config, ""))
    if unknown:
        raise UserError(_listed(path, unknown))
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(_listed(path, [_describe(problem) for problem in error.errors()])) from None


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that loads back equal."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_tree(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    """The file's mapping merged over what it extends."""
    if path.resolve() in chain:
        raise UserError(f"extends runs in a circle: {' -> '.join(map(str, (*chain, path.resolve())))}")
    tree = _read_yaml(path)
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    return _merged(_read_tree(path.parent / str(parent), (*chain, path.resolve())), tree)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            tree = yaml.load(file, _UniqueKeyLoader)  # noqa: S506, a SafeLoader
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the path of a YAML configuration, e.g. configs/quickstart.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must be a mapping of sections (model:, data:, trainer:, ...), not {type(tree).__name__}")
    return tree


def _merged(base: Mapping[str, Any], child: Mapping[str, Any]) -> dict[str, Any]:
    """`child` over `base`, mapping by mapping; a null in the child removes the key."""
    merged = dict(base)
    for key, value in child.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = value
    return merged


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set one `dotted.key=value`; the value is read as YAML, null removes the key."""
    dotted, equals, text = override.partition("=")
    if not equals or not all(dotted.split(".")):
        raise UserError(f"the override {override!r} is not of the form dotted.key=value, e.g. optimizer.lr=2e-6")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the value of the override {override!r} is not valid YAML: {error}") from None
    *sections, key = dotted.split(".")
    node = tree
    for depth, section in enumerate(sections):
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            raise UserError(f"the override {override!r} goes below {'.'.join(sections[: depth + 1])}, which is {child!r}")
        node = child
    if value is None:
        node.pop(key, None)
    else:
        node[key] = value


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class in an annotation such as `Section | None`."""
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def _all_keys(section: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        child = _section_of(field.annotation)
        if child is not None:
            yield from _all_keys(child, f"{prefix}{name}.")


def _unknown_keys(tree: Mapping[Any, Any], section: type[BaseModel], prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        field = section.model_fields.get(key)
        if field is None:
            yield f"{prefix}{key}: unknown key; {_suggestion(str(key), section, prefix)}"
            continue
        child = _section_of(field.annotation)
        if child is not None and isinstance(value, Mapping):
            yield from _unknown_keys(value, child, f"{prefix}{key}.")


def _suggestion(key: str, section: type[BaseModel], prefix: str) -> str:
    """The nearest key of the section, or the same or nearest key of any other section."""
    near = difflib.get_close_matches(key, section.model_fields, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    everywhere = list(_all_keys(Config, ""))
    last_parts = [dotted.rsplit(".", 1)[-1] for dotted in everywhere]
    near = difflib.get_close_matches(key, last_parts, n=1)
    if near:
        return f"did you mean {everywhere[last_parts.index(near[0])]}?"
    return f"known keys here: {', '.join(section.model_fields)}"


def _describe(problem: Any) -> str:
    """One line for one pydantic finding: key, value, rule."""
    key = ".".join(map(str, problem["loc"])) or "configuration"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{key}: required, but not given"
    if isinstance(problem["input"], Mapping):
        return f"{key}: {message}"
    return f"{key}: {problem['input']!r} is not accepted; {message[0].lower()}{message[1:]}"


def _listed(path: Path, problems: Sequence[str]) -> str:
    lines = "\n".join(f"  {problem}" for problem in problems)
    return f"{path} has {len(problems)} problem{'s' if len(problems) > 1 else ''}:\n{lines}"
