import asyncio

import pytest

from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.records import FinishReason
from megatron_bapo.rewards.scorer import RewardRequest, RewardResult, Scorer

MODULE = """
import time

def half(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "slow":
        time.sleep(60)
    return {"score": 0.5}

def is_whole(data_source, solution_str, ground_truth, extra_info=None, finish_reason=None):
    return finish_reason == "stop"
"""
CHAIN_SUM = ("reasoning_gym/chain_sum", {"question": "40 + 2 =", "answer": "42", "metadata": {}})


def scores(config: RewardConfig, *answers: str, finish_reason: FinishReason = "stop") -> list[RewardResult]:
    source, entry = CHAIN_SUM

    async def main() -> list[RewardResult]:
        scorer = Scorer(config)
        try:
            requests = [
                RewardRequest("train:0", source, answer, "42", entry, finish_reason=finish_reason) for answer in answers
            ]
            return await asyncio.gather(*map(scorer.score, requests))
        finally:
            scorer.close()

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["math_verify", "reasoning_gym"])
def test_math_and_reasoning_gym_rewards_are_served(kind):
    assert scores(RewardConfig(type=kind), "42") == [RewardResult(1.0, answer="42")]


def test_without_a_reward_every_response_gets_zero():
    assert [result.reward for result in scores(RewardConfig(type="none"), "42", "41")] == [0.0, 0.0]


def test_without_partial_credit_only_a_full_score_counts():
    config = RewardConfig(type="reasoning_gym", partial_credit=False)
    assert [result.reward for result in scores(config, "42", "142", "41")] == [1.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(("partial_credit", "reward"), [(True, 0.5), (False, 0.0)])
def test_a_response_whose_scoring_times_out_gets_the_timeout_reward(tmp_path, monkeypatch, partial_credit, reward):
    (tmp_path / "scorer_test_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardConfig(
        type="function",
        function="scorer_test_rewards:half",
        timeout_s=1.0,
        timeout_reward=-0.5,
        partial_credit=partial_credit,
    )
    assert scores(config, "slow", "42") == [RewardResult(-0.5, timed_out=True), RewardResult(reward)]


def test_a_truncated_response_is_scored_like_any_other_without_a_truncated_reward():
    """The last number of an unfinished chain of thought can be right by chance."""
    config = RewardConfig(type="math_verify")
    cut = "First 40 + 2 makes 42"
    assert scores(config, cut, finish_reason="length") == [RewardResult(1.0, answer="42")]
    config = RewardConfig(type="math_verify", truncated_reward=-0.5)
    assert scores(config, cut, finish_reason="length") == [RewardResult(-0.5)]
    assert scores(config, cut) == [RewardResult(1.0, answer="42")]


def test_a_function_can_receive_the_finish_reason(tmp_path, monkeypatch):
    (tmp_path / "scorer_test_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardConfig(type="function", function="scorer_test_rewards:is_whole")
    assert [scores(config, "42", finish_reason=reason)[0].reward for reason in ("stop", "length")] == [1.0, 0.0]
