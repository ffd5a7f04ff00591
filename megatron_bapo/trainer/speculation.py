"""Whether to train a minibatch by predicted clip bounds or to score it first."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median
from typing import Final

RECENT_UPDATES: Final = 32
"""Updates whose predictions make up the miss rate."""
MIN_MEASURED: Final = 3
"""Updates that are scored first of all, to learn what scoring costs."""
SCORE_EVERY: Final = 64
"""Updates after which one is scored in any case, because costs change."""


class Speculation:
    """The record of predictions and costs so far. Every rank keeps the same one and so comes to the same decisions.

    A right prediction saves the scoring pass, a wrong one costs a second training pass: predicting pays as long as the
    miss rate is below the scoring pass's share of a training pass. Predictions are compared in scored updates, too.
    """

    def __init__(self) -> None:
        self._misses: deque[bool] = deque(maxlen=RECENT_UPDATES)
        self._scoring_costs: deque[float] = deque(maxlen=2 * MIN_MEASURED)
        self._num_unscored = 0

    @property
    def pays(self) -> bool:
        if len(self._scoring_costs) < MIN_MEASURED or self._num_unscored >= SCORE_EVERY:
            return False
        return fmean(self._misses) < median(self._scoring_costs)

    def record(self, *, missed: bool, scoring_cost: float | None = None) -> None:
        """One update: whether the prediction was wrong, and, if it was scored, the scoring in training passes."""
        self._misses.append(missed)
        self._num_unscored += 1
        if scoring_cost is not None:
            self._scoring_costs.append(scoring_cost)
            self._num_unscored = 0
