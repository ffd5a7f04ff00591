"""Read the files that wandb writes in offline mode, as its server would.

Records are protobuf messages in LevelDB's log format (github.com/google/leveldb, doc/log_format.md) after 7 bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


@dataclass
class WandbFiles:
    runs: list[tuple[str, str, str]] = field(default_factory=list)
    """(project, id, name) for each time that a run was opened."""
    axes: dict[str, str] = field(default_factory=dict)
    """x axis of each metric."""
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Logged values by wandb's step, without the keys that wandb adds and without tables."""
    tables: list[tuple[int, str, list[dict[str, Any]]]] = field(default_factory=list)
    """(wandb's step, name, rows by column) of each logged table."""


def read_wandb(run_dir: Path) -> WandbFiles:
    found = WandbFiles()
    files = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    for path, record in ((file, each) for file in files for each in _records(file)):
        match record.WhichOneof("record_type"):
            case "run":
                found.runs.append((record.run.project, record.run.run_id, record.run.display_name))
            case "metric":
                found.axes[record.metric.name] = record.metric.step_metric
            case "history":
                items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
                values = {name: json.loads(value) for name, value in items.items() if not name.startswith("_")}
                names = {name.removesuffix("._type") for name, kind in values.items() if kind == "table-file"}
                step = record.history.step.num
                for name in sorted(names):
                    content = json.loads((path.parent / "files" / values[f"{name}.path"]).read_text())
                    rows = [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
                    found.tables.append((step, name, rows))
                found.rows.append((step, {k: v for k, v in values.items() if k.partition(".")[0] not in names}))
    return found


def _records(file: Path) -> Iterator[Record]:
    data, position, parts = file.read_bytes(), HEADER, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER + length
        parts += data[position - length : position]
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""
