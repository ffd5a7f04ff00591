"""Prompts that are skipped because their requests or functions failed, and how many of them end the run."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_bapo.errors import FunctionFailed, RunError


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
