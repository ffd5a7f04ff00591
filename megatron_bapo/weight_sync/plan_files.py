"""Files through which trainer ranks announce a version to the engines on a host. Each file is written atomically.

<folder>/plan-<digest>.json      a plan
         00000007-rank-0.json    announcement of a version by a trainer rank: the plan and how to read its slices
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from megatron_bapo.errors import RunError
from megatron_bapo.weight_sync.plan import WeightPlan


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)


def write_plan(folder: Path, plan: WeightPlan) -> None:
    """Write a plan to the folder unless it is there already."""
    if not (path := _plan_path(folder, plan.digest)).exists():
        write_json(path, plan.to_json())


def read_plan(folder: Path, digest: str) -> WeightPlan:
    """Read the plan with this digest from the folder."""
    return _read_plan(_plan_path(folder, digest))


def announce(folder: Path, version: int, rank: int, plan: WeightPlan, **content: object) -> None:
    """Announce a version for a trainer rank; `content` says how to read its slices."""
    write_plan(folder, plan)
    write_json(_path(folder, version, rank), {"plan": plan.digest, **content})


def announced(folder: Path, version: int, rank: int) -> dict[str, Any]:
    """Return a rank's announcement of a version. Raises RunError if there is none."""
    try:
        return json.loads(_path(folder, version, rank).read_text())
    except FileNotFoundError:
        raise RunError(f"trainer rank {rank} has not announced policy version {version} in {folder}") from None


def withdraw(folder: Path, version: int, rank: int) -> None:
    """Withdraw a rank's announcement of a version."""
    _path(folder, version, rank).unlink(missing_ok=True)


def announced_plan(folder: Path, version: int) -> WeightPlan:
    """Return the plan of a version that trainer rank 0 has announced."""
    return read_plan(folder, announced(folder, version, 0)["plan"])


def _plan_path(folder: Path, digest: str) -> Path:
    return folder / f"plan-{digest}.json"


@cache
def _read_plan(path: Path) -> WeightPlan:
    """Read and cache a plan; a plan never changes, because its file name is its digest."""
    return WeightPlan.from_json(json.loads(path.read_text()))


def _path(folder: Path, version: int, rank: int) -> Path:
    return folder / f"{version:08d}-rank-{rank}.json"
