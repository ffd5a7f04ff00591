"""Ranks wait for the main rank, which waits for engines, longer than for each other."""

import json
from pathlib import Path

from tests.parallel.launching import launch

CALL_S = 3.0


def test_ranks_wait_for_the_main_rank_longer_than_a_collective_may_take(tmp_path: Path) -> None:
    parallel = {"world_size": 4, "tensor_model_parallel_size": 2}
    launch("waiting_ranks.py", [{"name": "slow", "parallel": parallel, "call_s": CALL_S}], tmp_path, 4)

    seen = json.loads((tmp_path / "slow" / "seen.json").read_text())
    assert [answers for answers, _ in seen] == [["answer", None]] + [[None, None]] * 3
    assert all(waited_s > 0.9 * CALL_S for _, waited_s in seen)
