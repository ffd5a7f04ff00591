"""Exactly-once accounting: where each prompt that was drawn from the stream is, with sums that are checked at every
transition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from megatron_bapo.errors import UserError
from megatron_bapo.metrics.values import Last, Metric

Place = Literal["in_flight", "buffered", "returned"]
"""Where a prompt is that is still to be trained on; `returned`: back in front of the stream of a resumed run."""
Outcome = Literal["trained", "warm_start", "dropped_uniform", "dropped_stale", "set_aside", "skipped"]
"""How a prompt ends. The two rules by which groups are dropped: all rewards are equal, tokens are too old; `skipped`:
passed over by the curriculum in this epoch."""
PLACES: tuple[Place, ...] = ("in_flight", "buffered", "returned")
OUTCOMES: tuple[Outcome, ...] = ("trained", "warm_start", "dropped_uniform", "dropped_stale", "set_aside", "skipped")


class Ledger:
    """Each prompt has a serial number, in the order in which it was drawn."""

    def __init__(self, num_drawn: Callable[[], int]) -> None:
        """`num_drawn`: how many prompts the stream has given away or skipped, by the stream's own count."""
        self._num_drawn = num_drawn
        self._open: dict[int, tuple[str, Place]] = {}
        self._closed: Counter[str] = Counter()
        self._next_serial = 0

    def draw(self, prompt_id: str) -> int:
        """A prompt leaves the stream to be answered; its serial number."""
        serial = self._next_serial
        self._next_serial += 1
        self._open[serial] = (prompt_id, "in_flight")
        self.check()
        return serial

    def draw_worked_examples(self, num: int) -> None:
        """Prompts leave the stream for the warm start."""
        self._closed["warm_start"] += num
        self.check()

    def skip(self, num: int) -> None:
        """Prompts that the stream has passed over before the one that is drawn next."""
        self._closed["skipped"] += num

    def move(self, serial: int, place: Place) -> None:
        self._open[serial] = (self._open[serial][0], place)
        self.check()

    def close(self, serial: int, outcome: Outcome) -> None:
        del self._open[serial]
        self._closed[outcome] += 1
        self.check()

    def returned(self) -> list[tuple[int, str]]:
        """Serial number and id of the prompts in front of the stream, in their old order."""
        return [(serial, prompt_id) for serial, (prompt_id, place) in sorted(self._open.items()) if place == "returned"]

    def take_back(self, serial: int, prompt_id: str, place: Place) -> None:
        """A prompt is where it was when the run was interrupted. Raises UserError when it was not open then."""
        if self._open.get(serial) != (prompt_id, "returned"):
            raise UserError(
                f"the checkpoint holds rollouts of prompt {prompt_id} as number {serial}, which is not open by its "
                "state.json: the files are of different checkpoints; delete its *.parquet, and what they hold is "
                "generated anew"
            )
        self.move(serial, place)

    def check(self) -> None:
        counts = self.counts()
        assert sum(counts.values()) == self._num_drawn(), (
            f"the stream gave away {self._num_drawn()} prompts, the ledger knows of {sum(counts.values())}: {counts}"
        )

    def counts(self) -> dict[str, int]:
        places = Counter(place for _, place in self._open.values())
        return {name: places[name] for name in PLACES} | {name: self._closed[name] for name in OUTCOMES}

    def metrics(self) -> dict[str, Metric]:
        """Prompts since the run's start, by where they are; they add up to `drawn`."""
        counts = self.counts() | {"drawn": self._num_drawn()}
        return {f"rollout/accounting/{name}": Last(count) for name, count in counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """JSON values. Who continues from them has every open prompt returned, until `take_back` says otherwise."""
        return {
            "next_serial": self._next_serial,
            "open": [[serial, prompt_id] for serial, (prompt_id, _) in sorted(self._open.items())],
            "closed": dict(self._closed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The stream must have been restored before."""
        self._next_serial = state["next_serial"]
        self._open = {serial: (prompt_id, "returned") for serial, prompt_id in state["open"]}
        self._closed = Counter(state["closed"])
        self.check()
