"""What one check of the doctor has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One row: what was checked, what was found and, unless all is well, what to do."""

    name: str
    status: Status
    found: str
    advice: str = ""
