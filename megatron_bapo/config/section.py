"""The base class and the number types of the configuration's sections."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PartialFraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]


class Section(BaseModel):
    """Base class of all sections: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for numbers, which pydantic would read as 1 and 0."""
        kinds = _kinds(cls.model_fields[info.field_name or ""].annotation) if isinstance(value, bool) else set()
        if kinds & {int, float} and bool not in kinds:
            raise ValueError("must be a number")
        return value


def _kinds(annotation: Any) -> set[type]:
    """Return the types of a field's values, including those of a Literal's values but not those of a list's entries."""
    if get_origin(annotation) in (Annotated, Literal, Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    return {annotation if isinstance(annotation, type) else type(annotation)}
