"""Counters of one rollout batch, which are reset when the trainer takes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_bapo.metrics.values import Mean, Metric, Sum


@dataclass
class BatchCounts:
    """Counters that are reset with each batch."""

    reward_timeouts: int = 0
    request_failures: int = 0
    stale_responses: int = 0
    """Responses of the groups that were dropped as stale."""
    stale_tokens: int = 0
    """Tokens that these responses had when they were dropped."""

    def add_stale(self, lengths: Iterable[int]) -> None:
        """Count the responses of a group that is dropped as stale, by their lengths in tokens."""
        for length in lengths:
            self.stale_responses += 1
            self.stale_tokens += length

    def metrics(self) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {"rollout/request_failures": Sum(self.request_failures)}
        if self.stale_responses:
            metrics["rollout/dropped_stale/response_length_mean"] = Mean(self.stale_tokens, self.stale_responses)
        return metrics
