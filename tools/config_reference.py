"""Print every key of the configuration with its values, default and meaning, as docs/reference/configuration.md.

python tools/config_reference.py > docs/reference/configuration.md
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_bapo.config.evaluation import EvalConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.config.section import Section

INTRODUCTION = """# Configuration

A configuration is one YAML file. This page lists every key, first those of a run and then those that only `eval` has.
It is generated from the schema by `python tools/config_reference.py`.

- **Writing keys.** A key is written in YAML under its section, or on the command line with dots: `optimizer.lr=2e-6`.
  On the command line, `null` restores the default. Keys marked *required* have no default.
- **Checks.** Unknown keys and values outside the listed ones are errors. Rules that span several keys are checked
  before anything starts, also by `train CONFIG --dry-run`.
- **Inheritance.** `extends: other.yaml` inherits from another file, whose path is relative to the file that names it.
  Sections are merged key by key, and `null` removes a key that the other file has.
- **Keys whose value is a mapping**, such as `data.train.reasoning_gym`, are replaced as a whole by the file or by the
  command line. A dotted key changes a single entry: `data.train.reasoning_gym.chain_sum.max_terms=3`.

All batch sizes count trajectories:

```yaml
rollout: {n: 8}                # responses per prompt
trainer:
  train_batch_size: 512        # 64 prompts x 8 responses in a rollout batch
  ppo_mini_batch_size: 128     # 4 updates per rollout batch
```
"""
EVALUATION = """## Keys of an evaluation

`eval` also reads the keys of `data.validation`, `reward` and `rollout` above that say how prompts are read, responses
scored and engines run. The keys below exist only for `eval`, or have another default there.
"""
LINE_LENGTH = 120
HEADER = "| key | value | default | meaning |\n| --- | --- | --- | --- |"

SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of"}
NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path"}


def reference() -> str:
    run = "\n".join(_tables("", Config, "The run"))
    evaluation = _tables("", EvalConfig, "The evaluation", level="###", known=run.splitlines())
    return "\n".join([INTRODUCTION, run, EVALUATION, *evaluation])


def _tables(
    prefix: str,
    section: type[Section],
    title: str = "",
    *,
    level: str = "##",
    optional: bool = False,
    known: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the table of a section's own keys, then those of the sections in it, without the rows that are `known`."""
    docstrings = _docstrings(section)
    nested = {name: found for name, field in section.model_fields.items() if (found := _section_of(field)) is not None}
    plain = [(name, section.model_fields[name]) for name in docstrings if name not in nested]
    rows = [row for name, field in plain if (row := _row(f"{prefix}{name}", field, docstrings[name])) not in known]
    if rows:
        title = f"{level} {title}" if title else f"{level} `{prefix.rstrip('.')}`"
        about = " ".join([*(section.__doc__ or "").split(), "This section is optional." * optional])
        lines = textwrap.wrap(about, LINE_LENGTH, break_long_words=False, break_on_hyphens=False)
        yield "\n".join([title, "", *([*lines, ""] if lines else []), HEADER, *rows, ""])
    for name, found in nested.items():
        is_optional = section.model_fields[name].default is None
        yield from _tables(f"{prefix}{name}.", found, level=level, optional=is_optional, known=known)


def _docstrings(section: type[Section]) -> dict[str, str]:
    """Return the docstring of each field in the order of the source, inherited fields first."""
    found: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if not issubclass(cls, Section) or cls is Section:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found[statement.target.id] = ""
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def _row(key: str, field: FieldInfo, meaning: str) -> str:
    default = "*required*" if field.is_required() else f"`{_as_yaml(field.get_default(call_default_factory=True))}`"
    values = _values(field.annotation, field.metadata)
    return f"| `{key}` | {_cell(values)} | {_cell(default)} | {_cell(meaning)} |"


def _values(annotation: Any, limits: Sequence[Any] = (), *, in_list: bool = False) -> str:
    """Describe the values of a key, such as `whole number > 0`, `a or b`, or `list of texts` with those `in_list`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [limit for found in inner[1:] for limit in getattr(found, "metadata", [found])]
        return _values(inner[0], limits, in_list=in_list)
    if origin is Literal:
        return ", ".join(f"`{_as_yaml(value)}`" for value in inner)
    if origin is tuple:
        return f"list of {_values(inner[0], in_list=True)}"
    if origin is dict:
        return "mapping"
    if inner:
        described = [_values(arg, in_list=in_list) for arg in inner if arg is not NoneType]
        # A null outside of lists is the default, which the next column shows.
        return " and ".join([*described, *["`null`"] * (NoneType in inner)]) if in_list else " or ".join(described)
    bounds = [
        f"{sign} {getattr(limit, name):.10g}"
        for limit in limits
        for name, sign in SIGNS.items()
        if hasattr(limit, name)
    ]
    return " ".join([NAMES[annotation] + "s" * in_list, ", ".join(bounds)]).strip()


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(_as_yaml, value))}]" if isinstance(value, tuple) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _section_of(field: FieldInfo) -> type[Section] | None:
    types = [field.annotation, *get_args(field.annotation)]
    return next((t for t in types if inspect.isclass(t) and issubclass(t, Section)), None)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(reference(), end="")
