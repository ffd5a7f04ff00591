"""Description of how an engine receives its weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self


@dataclass(frozen=True)
class WeightRoute:
    """Transport of the weights to one engine, and its parameters."""

    folder: Path
    """Folder of the weight store, or of the announcements of trainer ranks."""
    transport: Literal["store", "cuda_ipc", "nccl"] = "store"
    first_place: int = 0
    """Index of the engine's first rank among the hosts of the plan, if every rank is a separate host."""
    num_places: int = 0
    """Number of trainer and engine ranks, which form the process group of `nccl`."""
    timeout_s: float = 900.0
    """Timeout of the operations of that group."""
    other_folders: tuple[Path, ...] = ()
    """Folders of the weight stores on the engine's other nodes, in the order of their ranks."""

    def on_node(self, number: int) -> Self:
        """Return the route of the ranks on one of the engine's nodes, which read the weight store of that node."""
        return replace(self, folder=(self.folder, *self.other_folders)[number], other_folders=())

    @property
    def rendezvous(self) -> str:
        return f"file://{self.folder / 'transfer-group'}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder), "other_folders": [*map(str, self.other_folders)]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        folders: dict[str, Any] = {
            "folder": Path(content["folder"]),
            "other_folders": tuple(map(Path, content["other_folders"])),
        }
        return cls(**(content | folders))
