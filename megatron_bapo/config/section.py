"""The base class and the number types of the configuration's sections."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PartialFraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
"""The seeds that NumPy's global generator takes, which vLLM seeds."""


def _function_name(name: str) -> str:
    if not re.fullmatch(r"[^/:]+(?<!\.py):[^/:]+", name):
        raise ValueError("write it as path.to.module:function, with dots for / and without .py")
    return name


FunctionName = Annotated[str, AfterValidator(_function_name)]
"""Name of a function of the user's, `path.to.module:function`."""
_LONGEST_NAME = 255
"""Bytes of the longest name of a file or folder on Linux."""


class Section(BaseModel):
    """Base class of all sections: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for numbers, also in lists of them, which pydantic would read as 1 and 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and _has_only_numbers(_kinds(annotation)):
            raise ValueError("must be a number")
        has_bool = isinstance(value, list | tuple) and any(isinstance(entry, bool) for entry in value)
        if has_bool and _has_only_numbers(_entry_kinds(annotation)):
            raise ValueError("must be a list of numbers")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _expand_path(cls, value: Any, info: ValidationInfo) -> Any:
        """Return a path with the home directory for ~. Refuse text that cannot be a path or names a variable."""
        if not isinstance(value, str) or Path not in _kinds(cls.model_fields[info.field_name or ""].annotation):
            return value
        if not value or "\0" in value or max(len(os.fsencode(name)) for name in value.split("/")) > _LONGEST_NAME:
            raise ValueError(f"must be a path: not empty, no NUL character, no name of over {_LONGEST_NAME} bytes")
        if variable := re.search(r"\$([A-Za-z_]\w*|\{[^}]*\})", value):
            raise ValueError(
                f"{variable[0]} would be part of a name, because environment variables are not read in files; write "
                'the path out, or pass it on the command line in double quotes, such as run_dir="$SCRATCH/run"'
            )
        return os.path.expanduser(value)


def check_required(key: str, value: Any, choice: str, *, is_chosen: bool) -> None:
    """Raise ValueError unless a key has a value exactly where another key's `choice` requires it."""
    if is_chosen != (value is not None):
        raise ValueError(f"{key} is required by {choice} and allowed only there; set both or neither")


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the types of which a field's value may be one, besides None."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(kind for kind in kinds if kind is not type(None))


def _entry_kinds(annotation: Any) -> set[type]:
    """Return the types of the entries of a field that may be a list."""
    lists = (kind for kind in alternatives(annotation) if get_origin(kind) is tuple)
    return set().union(*(_kinds(entry) for kind in lists for entry in get_args(kind)))


def _has_only_numbers(kinds: set[type]) -> bool:
    return bool(kinds & {int, float}) and bool not in kinds


def _kinds(annotation: Any) -> set[type]:
    """Return the types of a field's values, including those of a Literal's values but not those of a list's entries."""
    if get_origin(annotation) in (Annotated, Literal, Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {annotation if isinstance(annotation, type) else type(annotation)}
