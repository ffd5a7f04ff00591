"""Exactly-once accounting of prompts taken from the stream; the totals are checked at every transition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from megatron_bapo.errors import UserError
from megatron_bapo.metrics.values import Last, Metric

Place = Literal["in_flight", "buffered", "returned"]
"""Where an open prompt is; `returned` prompts were open in a resumed run's checkpoint and are generated again first."""
Outcome = Literal["trained", "warm_start", "dropped_uniform", "dropped_stale", "quarantined", "skipped"]
"""How a prompt was closed. A group is dropped as uniform if all its rewards are equal, as stale if its tokens are too
old. A prompt is skipped if the curriculum passes over it in this epoch."""
PLACES: tuple[Place, ...] = ("in_flight", "buffered", "returned")
OUTCOMES: tuple[Outcome, ...] = ("trained", "warm_start", "dropped_uniform", "dropped_stale", "quarantined", "skipped")


class Ledger:
    """Knows where each prompt is; prompts have serial numbers in the order in which they left the stream."""

    def __init__(self, num_taken: Callable[[], int]) -> None:
        """`num_taken` returns the stream's own count of the prompts that it has given out or skipped."""
        self._num_taken = num_taken
        self._open: dict[int, tuple[str, Place]] = {}
        self._places: Counter[Place] = Counter()
        """Number of open prompts by place, because each transition checks the totals."""
        self._closed: Counter[Outcome] = Counter()
        self._next_serial = 0

    def open(self, prompt_id: str) -> int:
        """Register a prompt that was taken from the stream for generation; return its serial number."""
        serial = self._next_serial
        self._next_serial += 1
        self._open[serial] = (prompt_id, "in_flight")
        self._places["in_flight"] += 1
        self.check()
        return serial

    def add_warm_start(self, num: int) -> None:
        """Count prompts that were taken from the stream for the warm start."""
        self._closed["warm_start"] += num
        self.check()

    def skip(self, num: int) -> None:
        """Count prompts that the curriculum has skipped; the totals are checked when the next prompt is opened."""
        self._closed["skipped"] += num

    def move(self, serial: int, place: Place) -> None:
        prompt_id, before = self._open[serial]
        self._open[serial] = (prompt_id, place)
        self._places[before] -= 1
        self._places[place] += 1
        self.check()

    def close(self, serial: int, outcome: Outcome) -> None:
        _, place = self._open.pop(serial)
        self._places[place] -= 1
        self._closed[outcome] += 1
        self.check()

    def returned(self) -> list[tuple[int, str]]:
        """Return serial number and id of the prompts to generate before those of the stream, in serial order."""
        return [(serial, prompt_id) for serial, (prompt_id, place) in sorted(self._open.items()) if place == "returned"]

    def restore(self, serial: int, prompt_id: str, place: Place) -> None:
        """Move a returned prompt to its place at the checkpoint. Raises UserError if it was not open then."""
        if self._open.get(serial) != (prompt_id, "returned"):
            raise UserError(
                f"the checkpoint has rollouts of prompt {prompt_id} with serial number {serial}, which is not open "
                "according to its state.json: the files are from different checkpoints; delete the checkpoint's "
                "folder in_flight and its *.parquet files, and their rollouts are generated again"
            )
        self.move(serial, place)

    def check(self) -> None:
        num = self._places.total() + self._closed.total()
        assert num == self._num_taken(), (
            f"the stream has given out {self._num_taken()} prompts, the ledger has {num}: {self.counts()}"
        )

    def counts(self) -> dict[str, int]:
        return {name: self._places[name] for name in PLACES} | {name: self._closed[name] for name in OUTCOMES}

    def metrics(self) -> dict[str, Metric]:
        """Return the numbers of prompts since the run's start by place and outcome; they add up to `taken`."""
        places = Counter(place for _, place in self._open.values())
        assert places == self._places, f"the ledger's prompts are {places}, and it has counted {self._places}"
        counts = self.counts() | {"taken": self._num_taken()}
        return {f"rollout/accounting/{name}": Last(count) for name, count in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger as JSON values. Loading them marks every open prompt `returned`; see `restore`."""
        return {
            "next_serial": self._next_serial,
            "open": [[serial, prompt_id] for serial, (prompt_id, _) in sorted(self._open.items())],
            "closed": dict(self._closed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the ledger; the stream must have been restored before."""
        self._next_serial = state["next_serial"]
        self._open = {serial: (prompt_id, "returned") for serial, prompt_id in state["open"]}
        self._places = Counter({"returned": len(self._open)})
        self._closed = Counter(state["closed"])
        self.check()
