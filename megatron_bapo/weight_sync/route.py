"""Where an engine gets its weights from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self


@dataclass(frozen=True)
class WeightRoute:
    folder: Path
    """The weight store, or where trainer ranks announce what they have."""
    transport: Literal["store", "cuda_ipc", "nccl"] = "store"
    first_place: int = 0
    """Number of the engine's first rank among the plan's hosts, where every rank is a host of its own."""
    num_places: int = 0
    """Trainer ranks and engine ranks together; they form the group of `nccl`."""
    timeout_s: float = 900.0
    """Of that group's operations."""

    @property
    def rendezvous(self) -> str:
        return f"file://{self.folder / 'transfer-group'}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        fields: dict[str, Any] = content | {"folder": Path(content["folder"])}
        return cls(**fields)
