"""Ranks wait for the main rank, which waits for engines, longer than for each other, but not for a stopped process."""

import json
from pathlib import Path

import pytest

from tests.parallel.launching import launch

PARALLEL = {"world_size": 4, "tensor_model_parallel_size": 2}
SLOW = {"name": "slow", "parallel": PARALLEL, "limit_s": 60.0, "call_s": 3.0, "is_stopped": False}
SHORT_LIMIT = {**SLOW, "name": "short limit", "limit_s": 2.0, "call_s": 9.0}
STOPPED = {**SLOW, "name": "stopped", "limit_s": 1.0, "is_stopped": True}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("waiting")
    launch("waiting_ranks.py", [SLOW, SHORT_LIMIT, STOPPED], root, 4)
    return root


@pytest.mark.parametrize("case", [SLOW, SHORT_LIMIT], ids=["a sign is not due", "signs of life"])
def test_ranks_wait_for_the_main_rank_longer_than_a_collective_may_take(results: Path, case: dict) -> None:
    seen = json.loads((results / case["name"] / "seen.json").read_text())
    assert [answers for answers, *_ in seen] == [["answer", None]] + [[None, None]] * 3
    assert all(waited_s > 0.9 * case["call_s"] for _, waited_s, _ in seen)


def test_ranks_give_up_when_the_main_ranks_process_is_stopped(results: Path) -> None:
    main, *others = json.loads((results / STOPPED["name"] / "seen.json").read_text())
    assert main[2] == ""
    assert all(
        "rank 0 has shown no sign of life for trainer.collective_timeout_s=1" in failure for *_, failure in others
    )
