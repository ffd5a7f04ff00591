"""Descriptions of how an engine receives its weights, and of the ranks that take part in a transfer."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

RENDEZVOUS_NAMESPACE = b"megatron-bapo-rendezvous"
"""Namespace in Ray's key-value store of everything by which process groups of weight transfers are formed."""

NUM_ATTEMPTS = 3
"""Number of groups in which a transfer from GPU to GPU is tried before its error ends the run."""


@dataclass(frozen=True)
class WeightRoute:
    """Transport of the weights to one engine, and its parameters."""

    folder: Path
    """Folder of the weight store, or of the announcements of trainer ranks."""
    transport: Literal["store", "cuda_ipc", "nccl"] = "store"
    first_place: int = 0
    """Index of the engine's first rank among the hosts of the plan, if every rank is a separate host."""
    rendezvous: str = ""
    """Where the ranks of a transfer group of `nccl` meet: ray://HOST:PORT of Ray's key-value store, or file:///path."""
    address: str = "127.0.0.1"
    """Address of the engine's first node, on which its ranks listen for those of a transfer group."""
    timeout_s: float = 900.0
    """Timeout of one transfer of `nccl`."""
    other_folders: tuple[Path, ...] = ()
    """Folders of the weight stores on the engine's other nodes, in the order of their ranks."""
    other_addresses: tuple[str, ...] = ()
    """Addresses of the engine's other nodes."""

    def on_node(self, number: int) -> Self:
        """Return the route of the ranks on one of the engine's nodes, which read the weight store of that node."""
        return replace(
            self,
            folder=(self.folder, *self.other_folders)[number],
            address=(self.address, *self.other_addresses)[number],
            other_folders=(),
            other_addresses=(),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"folder": str(self.folder), "other_folders": [*map(str, self.other_folders)]}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        read: dict[str, Any] = {
            "folder": Path(content["folder"]),
            "other_folders": tuple(map(Path, content["other_folders"])),
            "other_addresses": tuple(content["other_addresses"]),
        }
        return cls(**(content | read))


@dataclass(frozen=True)
class TransferGroup:
    """The ranks that take part in transfers from GPU to GPU."""

    name: str
    """Unique in the run."""
    plan: str
    """Digest of the plan."""
    places: tuple[int, ...]
    """Places in the plan, ascending, of the trainer ranks and of the ranks of the engines that take part. A rank of the
    process group is an index into them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        content = json.loads(text)
        return cls(content["name"], content["plan"], tuple(content["places"]))

    @property
    def failed_key(self) -> str:
        """Key of the reason why the group will transfer nothing more; whoever notices a fault sets it."""
        return f"{self.name}/failed"

    @property
    def next_key(self) -> str:
        """Key of the group that repeats the transfer in which this one has failed."""
        return f"{self.name}/next"

    def ready_key(self, place: int) -> str:
        """Key that is set when the rank at a place is ready to join."""
        return f"{self.name}/ready/{place}"

    @property
    def formed_key(self) -> str:
        """Key that is set when all ranks are ready to join."""
        return f"{self.name}/formed"

    def received_key(self, version: int, place: int) -> str:
        """Key that is set when the rank at a place has received all of a version."""
        return f"{self.name}/received/{version}/{place}"

    def committed_key(self, version: int) -> str:
        """Key that is set when all ranks have received a version."""
        return f"{self.name}/committed/{version}"
