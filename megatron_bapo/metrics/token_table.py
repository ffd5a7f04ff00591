"""Statistics of sampled tokens as Parquet, one file per step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TokenTable = Mapping[str, np.ndarray]
"""float32 columns of equal length, with the names in `COLUMNS`."""

COLUMNS = ("update", "log_ratio", "prob", "entropy", "advantage_sign")
"""Number of the update in the step, starting at 1; log(current / behaviour probability); the token's probability under
the current policy; the entropy of its distribution in nats; the sign of its advantage: -1, 0 or 1."""


def write_token_table(folder: Path, step: int, table: TokenTable) -> None:
    """Write `folder/step-00000012.parquet` atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, step)
    partial = path.with_suffix(".partial")
    pq.write_table(pa.table(dict(table)), partial)
    partial.replace(path)


def read_token_tables(folder: Path) -> dict[int, dict[str, np.ndarray]]:
    """Return the tables by step; empty if the folder is missing."""
    return {
        step: {name: column.to_numpy() for name, column in zip(COLUMNS, pq.read_table(path).columns, strict=True)}
        for step, path in _files(folder).items()
    }


def remove_token_tables_after(folder: Path, step: int) -> None:
    """Delete the tables of later steps, which a resumed run repeats."""
    for found, path in _files(folder).items():
        if found > step:
            path.unlink()


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.parquet"


def _files(folder: Path) -> dict[int, Path]:
    return {int(path.stem.removeprefix("step-")): path for path in sorted(folder.glob("step-*.parquet"))}
