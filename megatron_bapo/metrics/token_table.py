"""Sampled tokens as Parquet, a file a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TokenTable = Mapping[str, np.ndarray]
"""Float32 columns of equal length, by the names in `COLUMNS`."""

COLUMNS = ("update", "log_ratio", "prob", "entropy", "advantage_sign")
"""The step's update (1 is the first), log(current / behaviour probability), the token's probability under the current
policy, the entropy of its distribution in nats, and -1, 0 or 1."""


def write_token_table(folder: Path, step: int, table: TokenTable) -> None:
    """Write `folder/step-00000012.parquet` as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, step)
    partial = path.with_suffix(".partial")
    pq.write_table(pa.table(dict(table)), partial)
    partial.replace(path)


def read_token_tables(folder: Path) -> dict[int, dict[str, np.ndarray]]:
    """By step; none where the folder is missing."""
    return {
        step: {name: column.to_numpy() for name, column in zip(COLUMNS, pq.read_table(path).columns, strict=True)}
        for step, path in _files(folder).items()
    }


def remove_token_tables_after(folder: Path, step: int) -> None:
    """Drop those of the steps that a resumed run takes again."""
    for found, path in _files(folder).items():
        if found > step:
            path.unlink()


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.parquet"


def _files(folder: Path) -> dict[int, Path]:
    return {int(path.stem.removeprefix("step-")): path for path in sorted(folder.glob("step-*.parquet"))}
