"""Loading of configuration files: YAML with `extends`, dotted overrides, and messages that list every problem.

A file may extend another one, whose name is relative to the file's own folder. Sections merge key by key, and the
extending file takes precedence. A mapping that is a key's value is replaced as a whole. A null removes the key of the
extended file, which restores its default. Overrides `section.key=value`, whose values are YAML, merge last by the same
rules, with two differences: they can set single keys of a mapping, and their null restores the default of any key.
Paths inside a configuration are relative to the current working directory, not to the file.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_bapo.config.schema import Config, Section
from megatron_bapo.config.section import alternatives
from megatron_bapo.config.yaml_text import parse_yaml, text_after
from megatron_bapo.errors import UserError
from megatron_bapo.text import without_credentials

EXTENDS = "extends"
TO_SET = "???"
"""What `translate` writes for a value that is still to be set."""

_RULES = {
    "missing": "is required",
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be text; put it in quotes",
    "path": "must be a path, written as text",
    "model": "must be a section: a mapping of keys to values",
    "dict": "must be a mapping of keys to values",
    "mapping": "must be a mapping of keys to values",
    "tuple": "must be a list, such as [a, b]",
    "invalid": "has a key that is not text; put the key in quotes",
}
"""Rule of each kind of pydantic error, by the first word of the error's type."""

RENAMED = {
    "rollout.on_refresh": "rollout.on_weight_update",
    "logging.num_sample_answers": "logging.num_sample_responses",
}
"""New names of renamed keys; the old names keep working for one release."""

_COUNTED_OTHERWISE = ("train_batch_size", "ppo_mini_batch_size")
"""Keys of verl, where they count prompts."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load a run's configuration from a YAML file and the files that it extends, with overrides (`optimizer.lr=2e-6`).

    Raises UserError for a file that cannot be read or parsed, or with a list of every unknown key and invalid value.
    """
    return load_section(Config, path, overrides)


AnySection = TypeVar("AnySection", bound=Section)


def load_section(section: type[AnySection], path: str | Path, overrides: Sequence[str] = ()) -> AnySection:
    """Load a file that is a `section`, as `load_config` does."""
    document = _document(section, path, overrides)
    try:
        return section.model_validate(document)
    except ValidationError as error:
        if section is Config:
            _refuse_foreign_file(path, document)
        _refuse_other_command(section, path, overrides)
        problems = [f"  {problem}" for problem in problems_of(error, section, document)]
    source = " ".join([str(path), *(f"with {override}" for override in overrides)])
    plural = "s" if len(problems) > 1 else ""
    raise UserError(without_credentials("\n".join([f"{source}: {len(problems)} problem{plural}", *problems])))


def _document(section: type[Section], path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values of a file that is a `section`, with what it extends and the overrides."""
    document = _read(Path(path), section, ())
    for override in overrides:
        parts, value = _parse_override(override)
        if (new := RENAMED.get(".".join(parts))) is not None:
            _warn_renamed(".".join(parts), new, f"override {override!r}")
            parts = new.split(".")
        document = _overridden(document, parts, value, section)
    return document


def dump_config(config: Section) -> str:
    """Return all values, including defaults, as YAML that loads back equal. Relative paths stay relative."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path, section: type[Section], children: tuple[Path, ...]) -> dict[str, Any]:
    """Return the mapping in `path`, merged over the one it extends; `children` are the files that extend it."""
    chain = (*children, path)
    if path.resolve() in [child.resolve() for child in children]:
        raise UserError(f"{EXTENDS} is circular: {' -> '.join(map(str, chain))}; remove {EXTENDS} from one of them")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        named_in = f", which {children[-1]} extends" if children else ""
        start = children[-1].parent.absolute() if children else Path.cwd()
        raise UserError(
            f"cannot read the config file {path}{named_in}: {error.strerror}; relative paths start at {start}"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8") from None
    document = parse_yaml(text, str(path))
    if not isinstance(document, dict):
        contents = "nothing" if document is None else _shown(document)
        raise UserError(
            f"{path} contains {contents}; it must be a mapping of sections, such as trainer: {{total_steps: 100}}"
        )
    _rename(document, str(path))
    if EXTENDS not in document:
        return document
    parent = document.pop(EXTENDS)
    if not isinstance(parent, str):
        raise UserError(f"{path}: {EXTENDS}={_shown(parent)} must be one file name, relative to this file")
    return _merge(_read(path.parent / parent, section, chain), document, section)


def _rename(document: dict[str, Any], where: str) -> None:
    """Move the values of renamed keys to their new names, in place, with a warning."""
    for old, new in RENAMED.items():
        section, old_name = old.split(".")
        new_name = new.rpartition(".")[2]
        values = document.get(section)
        if not isinstance(values, dict) or old_name not in values:
            continue
        if new_name in values:
            raise UserError(f"{where} has both {old} and {new}, which is its new name; keep {new}")
        _warn_renamed(old, new, where)
        values[new_name] = values.pop(old_name)


def _warn_renamed(old: str, new: str, where: str) -> None:
    message = f"{where}: {old} is now {new}; the old name will be removed in the next release"
    warnings.warn(message, FutureWarning, stacklevel=2)


def _merge(parent: Mapping[str, Any], child: Mapping[str, Any], section: type[Section]) -> dict[str, Any]:
    """Return the child's values merged over the parent's, both of a `section`; neither is changed."""
    merged = dict(parent)
    for key, value in child.items():
        subsection = _subsection(section, key)
        if value is None and key in merged:
            del merged[key]
        elif subsection is not None and isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value, subsection)
        else:
            merged[key] = value
    return merged


def _overridden(
    document: Mapping[str, Any], parts: Sequence[str], value: Any, section: type[Section] | None
) -> dict[str, Any]:
    """Return the document with the value at a dotted key.

    `section` is that of the document, None within a mapping that is a value.
    """
    (key, *rest), merged = parts, dict(document)
    subsection = None if section is None else _subsection(section, key)
    old = merged.get(key)
    if rest:
        inner = _overridden(old if isinstance(old, dict) else {}, rest, value, subsection)
        if inner or key in merged:
            merged[key] = inner
    elif value is None and (section is None or key in section.model_fields or key in merged):
        merged.pop(key, None)
    elif subsection is not None and isinstance(value, dict):
        merged[key] = old if isinstance(old, dict) else {}
        for name, each in value.items():
            merged[key] = _overridden(merged[key], [name], each, subsection)
    else:
        merged[key] = value
    return merged


def _parse_override(override: str) -> tuple[list[str], Any]:
    key, equals, text = override.partition("=")
    parts = key.lstrip("+").split(".")  # Hydra marks a key with + that the file does not have
    if not (equals and text and all(parts)):
        raise UserError(
            f"override {override!r} must be KEY=VALUE with a dotted key, such as optimizer.lr=2e-6 (KEY=null restores "
            "the default, KEY='\"\"' is the empty text)"
        )
    value = parse_yaml(text, f"override {override!r}")
    if comment := text_after(text):
        raise UserError(
            f"override {override!r}: YAML takes {comment!r} for a comment; put the value in quotes, such as "
            f"'{key}=\"{text}\"'"
        )
    return parts, value


def _refuse_foreign_file(path: str | Path, document: Mapping[str, Any]) -> None:
    """Raise UserError for a whole configuration of verl or NeMo-RL."""
    from megatron_bapo.config.foreign_keys import project_of, projects

    project = project_of(document)
    if project is not None and "run_dir" not in document:
        title = projects()[project].title
        raise UserError(f"{path} is a configuration of {title}; `megatron-bapo translate {path}` prints it in our keys")


def _refuse_other_command(section: type[Section], path: str | Path, overrides: Sequence[str]) -> None:
    """Raise UserError for a file of another kind, such as an evaluation where a training run is expected."""
    from megatron_bapo.config.cluster import ClusterConfig
    from megatron_bapo.config.evaluation import EvalConfig

    queue = f"queue it with `megatron-bapo submit {path} --cluster NAME`"
    evaluate = "evaluate its model with configs/eval/paper.yaml and model.path=RUN_DIR"
    kinds: dict[type[Section], str] = {
        Config: f"a training run; {evaluate if section is EvalConfig else queue}",
        EvalConfig: f"an evaluation; run it with `megatron-bapo eval {path}`",
        ClusterConfig: f"a Slurm cluster; use it with `megatron-bapo submit CONFIG --cluster {path}`",
    }
    for kind, found in kinds.items():
        if kind is section or not (document := _document(kind, path, () if kind is ClusterConfig else overrides)):
            continue
        with suppress(ValidationError):
            kind.model_validate(document)
            raise UserError(f"{path} configures {found}")


def problems_of(error: ValidationError, root: type[Section], document: Mapping[str, Any]) -> list[str]:
    """Return one line each, with dotted key, value, rule and way out."""
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        found.setdefault(_location(details["loc"], root), []).append(details)
    problems: list[str] = []
    for location, errors in found.items():
        if errors[0]["type"] == "extra_forbidden":
            problems += _unknown_key(location, errors[0]["input"], root, document)
        elif not any(other[: len(location)] == location != other for other in found):
            # With an error below, the value has one of the field's types, and only this type's error is of use.
            problems.append(_broken_rule(".".join(location), errors) + _key_below(location, errors[0], root))
    return problems


def _location(parts: Sequence[str | int], root: type[Section]) -> tuple[str, ...]:
    """Return the keys that lead to an error, without the type as which pydantic tried a value that may be of several.

    Pydantic names this type behind the field.
    """
    remaining, location, section = map(str, parts), list[str](), root
    for name in remaining:
        location.append(name)
        field = section.model_fields.get(name) if section is not None else None
        if field is not None and len(alternatives(field.annotation)) > 1:
            next(remaining, None)
        section = _subsection(section, name) if section is not None else None
    return tuple(location)


def _broken_rule(key: str, errors: Sequence[ErrorDetails]) -> str:
    """Return the problem with one value; a value that may be of several types has an error for each of them."""
    value = errors[0]["input"]
    if errors[0]["type"] == "missing":
        return f"{key}: {_RULES['missing']}; set it"
    if value == TO_SET:
        return f"{key}={TO_SET}: is still to be set; `translate` writes {TO_SET} for a value that it cannot know"
    rules = ", or ".join(_rule(key, error) for error in errors)
    return f"{key}={_shown(value)}: {rules}" + ("; remove the key to use its default" if value is None else "")


def _key_below(location: tuple[str, ...], error: ErrorDetails, root: type[Section]) -> str:
    """Return the key that may have been meant where a section got a plain value."""
    section, value = root, error["input"]
    for name in location:
        section = _subsection(section, name) if section is not None else None
    if section is None or not error["type"].startswith("model") or isinstance(value, Mapping | list) or value is None:
        return ""
    key = ".".join(location)
    if "path" in section.model_fields and isinstance(value, str):
        return f"; did you mean {key}.path={value}?"
    return f"; its keys are {', '.join(f'{key}.{name}' for name in [*section.model_fields][:3])} and others"


def _rule(key: str, error: ErrorDetails) -> str:
    kind = error["type"]
    if kind == "value_error":
        return str(error.get("ctx", {}).get("error", error["msg"]))
    if kind == "literal_error":
        # Imported here: it is slow, and a key is seldom wrong.
        from megatron_bapo.config.foreign_hints import value_hint

        hint = value_hint(key, error["input"])
        return f"must be {error.get('ctx', {}).get('expected')}" + (f"; {hint}" if hint else "")
    return _RULES.get(kind.split("_")[0]) or error["msg"].replace("Input should be", "must be")


def _unknown_key(
    location: tuple[str, ...], value: Any, root: type[Section], document: Mapping[str, Any]
) -> Iterator[str]:
    """Yield what to write instead: our key for another project's, else the nearest name."""
    from megatron_bapo.config.foreign_hints import key_hints, with_given
    from megatron_bapo.config.foreign_keys import flattened

    key, keys = ".".join(location), list(dotted_keys(root))
    others = ((name, each) for name, each in flattened(document, "") if name not in keys)
    in_section, known = ".".join(location[:-1]) in ("", *keys), with_given(others, partial(value_in, root, document))
    hints = {} if key in keys else key_hints(key, value, keys, in_section=in_section, known=known)
    for theirs, (given, hint) in (hints or {key: (value, _nearest(location, value, root))}).items():
        yield f"{theirs}={_shown(given)}: unknown key; {hint}"


def value_in(section: type[Section], document: Any, key: str) -> Any:
    """Return the value of a dotted key in a section's document, else its default; None if it has neither."""
    (name, _, below), given = key.partition("."), document if isinstance(document, dict) else {}
    subsection = _subsection(section, name)
    if below and subsection is not None:
        return value_in(subsection, given.get(name), below)
    if name in given or name not in section.model_fields:
        return given.get(name)
    field = section.model_fields[name]
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _nearest(location: tuple[str, ...], value: Any, root: type[Section]) -> str:
    """Where an unknown key may have been meant to stand: in its own section, else in any other."""
    *parents, name = location
    if "." in name:
        return "dotted keys are for the command line; in a file, nest the sections"
    section = root
    for parent in parents:
        section = _subsection(section, parent) or section
    here = difflib.get_close_matches(name, section.model_fields, n=1)
    if here:
        return f"did you mean {'.'.join([*parents, *here])}?"
    known = list(dotted_keys(root))
    last_parts = {key.rpartition(".")[2] for key in known}
    near = name if name in last_parts else "".join(difflib.get_close_matches(name, last_parts, n=1, cutoff=0.8))
    elsewhere = [key for key in known if key.rpartition(".")[2] == near]
    if len(elsewhere) == 1 and near == name not in _COUNTED_OTHERWISE and not isinstance(value, dict):
        return f"did you mean {elsewhere[0]}={_shown(value)}?"
    if elsewhere:
        counted = " It counts trajectories, rollout.n for each of the prompts that verl counts"
        return f"did you mean {' or '.join(elsewhere)}?" + (counted if name in _COUNTED_OTHERWISE else "")
    return f"known here: {', '.join(section.model_fields)}"


def dotted_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name in section.model_fields:
        yield prefix + name
        subsection = _subsection(section, name)
        if subsection is not None:
            yield from dotted_keys(subsection, f"{prefix}{name}.")


def _subsection(section: type[Section], name: str) -> type[Section] | None:
    """Return the section that a field holds, also an optional one; None for a plain value or an unknown field."""
    if name not in section.model_fields:
        return None
    annotation = section.model_fields[name].annotation
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _shown(value: Any) -> str:
    """Return a value as YAML on one line, shortened to 80 characters."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).removesuffix("...\n").strip()
    return text if len(text) <= 80 else f"{text[:77]}..."
