"""Pass rates of scored groups, on their way to the curriculum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_bapo.data.curriculum import Curriculum, pass_rate
from megatron_bapo.records import Group


class PassRates:
    """Collects the pass rates of a batch and reports them in prompt order, so that they do not depend on timing."""

    def __init__(self, curriculum: Curriculum | None) -> None:
        """Without a curriculum nothing is collected."""
        self._curriculum = curriculum
        self._unreported: dict[int, tuple[str, float]] = {}
        """Prompt ids and pass rates by serial number."""

    def add(self, serial: int, group: Group) -> None:
        if self._curriculum is not None:
            self._unreported[serial] = (group.prompt.prompt_id, pass_rate(group))

    def report(self) -> None:
        """Report the pass rates to the curriculum."""
        if self._curriculum is not None:
            for _, (prompt_id, rate) in sorted(self._unreported.items()):
                self._curriculum.measure(prompt_id, rate)
        self._unreported.clear()

    def state_dict(self) -> list[list[Any]]:
        """Return the unreported pass rates as JSON values."""
        return [[serial, *rate] for serial, rate in self._unreported.items()]

    def load_state_dict(self, state: Sequence[Sequence[Any]]) -> None:
        self._unreported = {serial: (prompt_id, rate) for serial, prompt_id, rate in state}
