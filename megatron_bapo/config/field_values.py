"""Checks of single values of a model's `config.json`, with the messages about them."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_bapo.config.families import FAMILIES

_MAX_SIZE = (1 << 31) - 1
"""Largest size that the 32-bit indices of kernels reach."""
_MAX_COUNTS = {"num_hidden_layers": 1 << 12, "num_experts": 1 << 12}
"""Largest numbers of parts that are planned, built and transferred one by one."""


def expected(name: str, value: Any, kind: str) -> str:
    """Return the message about a field whose value is not of the expected kind, or missing."""
    if value is None:
        return f"{name} is missing; use the checkpoint's original config.json"
    return f"{name} is {reprlib.repr(value)}; it must be {kind}"


def is_number(value: Any) -> bool:
    """Return whether the value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def size_problems(fields: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    """Yield the fields among `names` that are no size, one line each."""
    for name in names:
        value, most = fields.get(name), _MAX_COUNTS.get(name, _MAX_SIZE)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            shown = FAMILIES[fields["model_type"]].expert_field if name == "num_experts" else name
            yield expected(shown, value, f"a positive whole number of at most {most}")
