"""The simulator against published speeds of asynchronous over synchronous training (bench/published_runs.yaml)."""

import pytest

from bench.published_runs import data, geometric_mean
from bench.published_speedups import speedup

ROWS = {row["name"]: row for row in data()["speedups"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_published_speedup_is_reproduced_within_15_percent(name: str) -> None:
    row = ROWS[name]
    simulated = geometric_mean([speedup(row, staleness) for staleness in row["staleness"]])
    assert simulated / row["published"] == pytest.approx(1.0, abs=0.15)
