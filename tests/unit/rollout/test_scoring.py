import asyncio

import numpy as np
import pytest

from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.errors import FunctionFailed
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rewards.scorer import Scorer
from megatron_bapo.rollout.scoring import score_group

MODULE = """
import time

def hangs_on_slow(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "slow":
        time.sleep(60)
    if solution_str == "broken":
        raise ValueError("no such answer")
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def settings(tmp_path, monkeypatch) -> RewardConfig:
    (tmp_path / "scoring_test_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return RewardConfig(
        type="function",
        function="scoring_test_rewards:hangs_on_slow",
        timeout_s=3.0,
        timeout_reward=-1.0,
        num_workers=2,
    )


def group(*texts: str) -> Group:
    one = np.zeros(1, np.int32)
    trajectories = (Trajectory(one, one, np.zeros(1, np.float32), (VersionSpan(0, 1),), "stop", text) for text in texts)
    return Group(Prompt("train:0", (), "right", ""), tuple(trajectories))


@pytest.mark.slow
def test_a_reward_that_hangs_delays_only_its_own_group_and_a_broken_one_names_the_prompt(settings: RewardConfig):
    async def main() -> None:
        scorer = Scorer(settings)
        slow = asyncio.ensure_future(score_group(group("right", "slow"), scorer))
        await asyncio.sleep(0.1)
        num_scored = 0
        while num_scored < 20 and not slow.done():
            scored = await score_group(group("right", "wrong"), scorer)
            assert [t.reward for t in scored.groups[0].trajectories] == [1.0, 0.0]
            num_scored += not slow.done()
        assert num_scored > 1
        scored = await slow
        assert [t.reward for t in scored.groups[0].trajectories] == [1.0, -1.0]
        assert scored.num_reward_timeouts == 1
        for _ in range(3):
            with pytest.raises(FunctionFailed, match=r"prompt train:0(.|\n)*no such answer"):
                await score_group(group("broken"), scorer)
        assert (await score_group(group("right"), scorer)).groups[0].trajectories[0].reward == 1.0
        scorer.close()

    asyncio.run(main())
