"""Files through which trainer ranks and engines on one host agree on a version; each appears whole or not at all.

<folder>/plan-<digest>.json      a plan
         00000007-rank-0.json    what a trainer rank announces of a version: the plan, and how to get its part
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
    aside = path.with_suffix(f".{os.getpid()}.partial")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def write_plan(folder: Path, plan: WeightPlan) -> None:
    if not (path := _plan_path(folder, plan.digest)).exists():
        write_json(path, plan.to_json())


def read_plan(folder: Path, digest: str) -> WeightPlan:
    return _read_plan(_plan_path(folder, digest))


def announce(folder: Path, version: int, rank: int, plan: WeightPlan, **content: object) -> None:
    write_plan(folder, plan)
    write_json(_path(folder, version, rank), {"plan": plan.digest, **content})


def announced(folder: Path, version: int, rank: int) -> dict[str, Any]:
    """Raises RunError when the rank has announced no such version."""
    try:
        return json.loads(_path(folder, version, rank).read_text())
    except FileNotFoundError:
        raise RunError(f"trainer rank {rank} has not announced policy version {version} in {folder}") from None


def withdraw(folder: Path, version: int, rank: int) -> None:
    _path(folder, version, rank).unlink(missing_ok=True)


def announced_plan(folder: Path, version: int) -> WeightPlan:
    """That of a version which the first trainer rank has announced."""
    return read_plan(folder, announced(folder, version, 0)["plan"])


def _plan_path(folder: Path, digest: str) -> Path:
    return folder / f"plan-{digest}.json"


@cache
def _read_plan(path: Path) -> WeightPlan:
    """Its name is its digest, so it never changes."""
    return WeightPlan.from_json(json.loads(path.read_text()))


def _path(folder: Path, version: int, rank: int) -> Path:
    return folder / f"{version:08d}-rank-{rank}.json"
