"""Reward function of `bench.rollout_scale`."""

from typing import Any


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """Return 1 for a response whose length in characters is a multiple of 3, else 0."""
    return float(len(solution_str) % 3 == 0)
