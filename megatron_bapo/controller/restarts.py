"""Restarts of a whole run from its newest checkpoint, with a limit on restarts without a new step."""

from __future__ import annotations

import time

from megatron_bapo.errors import RunError
from megatron_bapo.metrics.sinks import JsonlSink, read_rows
from megatron_bapo.run_directory import RunDirectory


class Restarts:
    """Counts the restarts of one command; a new furthest step resets the count."""

    def __init__(self, directory: RunDirectory, max_in_a_row: int) -> None:
        self._directory, self._max_in_a_row = directory, max_in_a_row
        self._num_in_a_row = 0
        self._furthest = (False, 0)
        """Whether the furthest recorded step is after the warm start, and its number."""
        self._first_failure = ""
        self.run_has_started = False
        """Whether all parts of the run have started once; otherwise the failure is likely a wrong configuration."""

    def use(self, failure: str) -> str:
        """Count and record a restart; return a message about it. Raises RunError if no restart is left."""
        if not self.run_has_started or not self._max_in_a_row:
            raise RunError(failure)
        furthest = max(self._furthest, self._newest_step())
        if furthest > self._furthest or not self._num_in_a_row:
            self._furthest, self._num_in_a_row, self._first_failure = furthest, 0, failure
        where = f"{'step' if furthest[0] else 'warm-start step'} {furthest[1]}"
        if self._num_in_a_row == self._max_in_a_row:
            raise RunError(
                f"{failure}\nThe run was restarted {self._num_in_a_row} times without progress after {where} "
                f"(trainer.max_restarts); the first failure was: {self._first_failure}"
            )
        self._num_in_a_row += 1
        with JsonlSink(self._directory.restarts) as restarts:
            restarts.write({"time_s": time.time(), "step": furthest[1], "reason": failure})
        newest = self._directory.newest_checkpoint
        message = (
            f"after {where}: {failure}\nrestart {self._num_in_a_row} of {self._max_in_a_row} without a new step, from "
            f"{newest.name if newest is not None else 'the beginning'}"
        )
        with self._directory.trainer_log.open("a") as log:
            log.write(f"{message}\n")
        return message

    def _newest_step(self) -> tuple[bool, int]:
        rows = read_rows(self._directory.metrics) if self._directory.metrics.exists() else []
        return max(((row["phase"] != "warm_start", row["step"]) for row in rows), default=(False, 0))
