"""What the server's answers have in common: JSON values, of which none is larger than `MAX_BYTES` as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

MAX_BYTES = 1_000_000
_HUGE = 1e308
"""Stands for infinity, which JSON has no number for."""


class NotFound(Exception):
    """There is no such run, step or response."""


def as_json(value: Any) -> bytes:
    """Return compact JSON in ASCII, which keeps lone surrogates of prompts."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def fitting(count: int, page: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    """Return the largest page of at most `count` entries whose JSON is not too large."""
    found = page(count)
    while count > 1 and len(as_json(found)) > MAX_BYTES:
        count //= 2
        found = page(count)
    return found


def number(value: float) -> float | None:
    """Return a number that JSON has, with six digits; None for NaN."""
    if isinstance(value, int):
        return value
    if math.isnan(value):
        return None
    return math.copysign(_HUGE, value) if math.isinf(value) else float(f"{value:.6g}")
