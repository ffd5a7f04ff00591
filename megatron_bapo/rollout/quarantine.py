"""Prompts that are skipped because their requests or functions failed, and how many of them end the run.

Functions have a budget in each batch. Requests have none, because a large data set may contain any number of prompts
that engines refuse; but if nothing else happens, then the fault is not in the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_bapo.errors import FunctionFailed, RunError

MIN_STREAK = 16
"""Fewest prompts in a row whose quarantine ends the run."""


class QuarantinedPrompt(RunError):
    """A prompt is skipped because its engine requests failed too often, or a function failed on its trajectories."""

    def __init__(self, prompt_id: str, failures: Sequence[str]) -> None:
        super().__init__(f"prompt {prompt_id} failed {len(failures)} times, the last time with: {failures[-1]}")
        self.prompt_id = prompt_id
        self.failures = tuple(failures)


class FailureBudget:
    """Number of function failures that only quarantine their prompt; the next failure ends the run."""

    def __init__(self, num: int) -> None:
        self._num = num
        self.num_used = 0

    def use(self, prompt_id: str, failure: FunctionFailed) -> QuarantinedPrompt:
        """Count a failure and return the error that quarantines its prompt.

        Raises FunctionFailed when the budget is used up.
        """
        if self.num_used == self._num:
            raise FunctionFailed(
                f"{failure}\n{self._num} prompts of this batch failed before (rollout.max_reward_failures)"
            )
        self.num_used += 1
        return QuarantinedPrompt(prompt_id, [str(failure)])


class QuarantineStreak:
    """Prompts that were quarantined for their requests since a group was last scored.

    They end the run when there are as many of them as groups in flight. Prompts may fail at once while others are still
    generated, but each that fails makes room for another one: as long as fewer than half of the prompts fail, the
    others fill all places before.
    """

    def __init__(self) -> None:
        self._first: QuarantinedPrompt | None = None
        self._num = 0

    def clear(self) -> None:
        """Begin again, because a group was scored."""
        self._first, self._num = None, 0

    def add(self, reason: QuarantinedPrompt, num_in_flight: int) -> QuarantinedPrompt:
        """Count a quarantined prompt, which is one of `num_in_flight`, and return its reason. Raises RunError."""
        self._first, self._num = self._first or reason, self._num + 1
        if self._num >= max(MIN_STREAK, num_in_flight):
            raise RunError(
                f"the requests of {self._num} prompts failed, and no group was scored in between, so the cause is "
                f"probably not in the prompts. First, {self._first}. See the engines' logs, remove the cause and run "
                "the same command again; it generates these prompts again"
            )
        return reason
