"""The simulator against published speeds of asynchronous over synchronous training (bench/published_runs.yaml)."""

import pytest

from bench.published_runs import data, geometric_mean
from bench.published_speedups import speedups

ROWS = {row["name"]: row for row in data()["speedups"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_published_speedup_is_reproduced_within_15_percent(name: str) -> None:
    row = ROWS[name]
    assert geometric_mean(speedups(row)) / row["published"] == pytest.approx(1.0, abs=0.15)
