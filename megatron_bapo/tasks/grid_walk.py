"""The task `grid_walk`: walk to a cell of a grid, one cell at a time.

    question  z>8:      cells of a grid of 8 x 8 are named, row by row, a to z, A to Z, 0 to 9, + and -
    answer    HPXYZ78   each cell is beside the one before it, and the last one is the target

It is a task in the form of reasoning-gym's. Any walk to the target is right, so the example of a long walk teaches the
rules, and reinforcement learning finds the short ones. A walk that makes more steps has more of them to get wrong, so
wrong responses are longer than right ones, as in long-context reasoning.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from reasoning_gym.factory import ProceduralDataset, register_dataset

NAME = "grid_walk"
CELLS = string.ascii_letters + string.digits + "+-"


@dataclass
class GridWalkConfig:
    """Parameters of the task."""

    width: int = 8
    height: int = 8
    min_distance: int = 2
    """Fewest steps from the start to the target."""
    max_distance: int = 7
    detours: float = 0.75
    """Share of the example's steps that go to a random neighbour instead of towards the target."""
    max_steps: int = 30
    """Most steps of the example."""
    restate_target: bool = False
    """Whether a response names the target after each cell, as in `H8P8X8Y8Z87888`: responses are twice as long, and
    the tokens that decide the next step are side by side."""
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raise AssertionError for parameters that no walk fulfils."""
        assert min(self.width, self.height) > 1, "width and height must be at least 2"
        assert self.width * self.height <= len(CELLS), f"width x height must be at most {len(CELLS)}"
        farthest = self.width + self.height - 2
        assert 1 <= self.min_distance <= self.max_distance <= farthest, (
            f"need 1 <= min_distance <= max_distance <= {farthest}, the distance of opposite corners"
        )
        assert self.max_steps >= self.max_distance, "max_steps must be at least max_distance"
        assert 0 <= self.detours < 1, "detours must be at least 0 and less than 1"


class GridWalkDataset(ProceduralDataset):
    """Questions with a start and a target, and a walk between them as the answer."""

    def __init__(self, config: GridWalkConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        rng, config = Random(self.seed + idx), self.config
        cells = range(config.width * config.height)
        start, target = rng.sample(cells, 2)
        while not config.min_distance <= _distance(start, target, config.width) <= config.max_distance:
            start, target = rng.sample(cells, 2)
        walk: list[int] = []
        while walk[-1:] != [target]:
            walk = [*islice(self._walk(rng, start, target), config.max_steps)]
        restated = CELLS[target] if config.restate_target else ""
        metadata = {"source_dataset": NAME, "source_index": idx, "width": config.width, "height": config.height}
        return {
            "question": f"{CELLS[start]}>{CELLS[target]}:",
            "answer": "".join(CELLS[cell] + restated for cell in walk),
            "metadata": metadata | ({"restate_target": True} if restated else {}),
        }

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Return 1.0 for a walk from the start to the target, else 0.0."""
        width, height = entry["metadata"]["width"], entry["metadata"]["height"]
        at, target = (CELLS.index(cell) for cell in entry["question"].rstrip(":").split(">"))
        walk = answer or ""
        if entry["metadata"].get("restate_target"):
            walk, restated = walk[::2], walk[1::2]
            if restated != CELLS[target] * len(walk):
                return 0.0
        for name in walk:
            cell = CELLS.find(name, 0, width * height)
            if cell < 0 or _distance(at, cell, width) != 1:
                return 0.0
            at = cell
        return float(at == target)

    def _walk(self, rng: Random, start: int, target: int) -> Iterator[int]:
        at, width, num_cells = start, self.config.width, self.config.width * self.config.height
        while at != target:
            near = [cell for cell in (at - width, at - 1, at + 1, at + width) if 0 <= cell < num_cells]
            near = [cell for cell in near if _distance(at, cell, width) == 1]
            if rng.random() >= self.config.detours:
                near = [cell for cell in near if _distance(cell, target, width) < _distance(at, target, width)]
            at = rng.choice(near)
            yield at


def _distance(one: int, other: int, width: int) -> int:
    """Return the number of steps between two cells of a grid."""
    return abs(one % width - other % width) + abs(one // width - other // width)


register_dataset(NAME, GridWalkDataset, GridWalkConfig)
