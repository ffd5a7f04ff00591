"""Result of one check of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table: name of the check, status, result and, unless it is ok, advice."""

    name: str
    status: Status
    found: str
    advice: str = ""
