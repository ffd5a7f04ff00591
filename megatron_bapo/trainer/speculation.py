"""Decides whether to train a minibatch under predicted clip bounds or to score it first."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median
from typing import Final

RECENT_UPDATES: Final = 32
"""Number of updates in the miss rate."""
MIN_MEASURED: Final = 3
"""Number of updates that are scored at the start to measure the cost of scoring."""
SCORE_EVERY: Final = 64
"""Number of updates after which one is scored in any case, because costs change."""


class Speculation:
    """History of predictions and costs. All ranks keep the same history and therefore make the same decisions.

    A correct prediction saves the scoring pass, and a wrong one costs a second training pass. Speculation therefore
    pays while the miss rate is below the cost of scoring in training passes. Scored updates also check the prediction.
    """

    def __init__(self) -> None:
        self._misses: deque[bool] = deque(maxlen=RECENT_UPDATES)
        self._scoring_costs: deque[float] = deque(maxlen=2 * MIN_MEASURED)
        self._num_unscored = 0

    @property
    def pays(self) -> bool:
        """Whether to train the next minibatch under predicted bounds."""
        if len(self._scoring_costs) < MIN_MEASURED or self._num_unscored >= SCORE_EVERY:
            return False
        return fmean(self._misses) < median(self._scoring_costs)

    def record(self, *, missed: bool, scoring_cost: float | None = None) -> None:
        """Record one update: whether its prediction missed and, if it was scored, the cost in training passes."""
        self._misses.append(missed)
        self._num_unscored += 1
        if scoring_cost is not None:
            self._scoring_costs.append(scoring_cost)
            self._num_unscored = 0
