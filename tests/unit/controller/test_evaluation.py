import pickle
from dataclasses import replace

import numpy as np
import pytest

from megatron_bapo.controller.evaluation import rollout_metrics, samples, validation_metrics
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import FinishReason, Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.hand_over import without_contents


def trajectory(reward: float, length: int = 2, finish_reason: FinishReason = "stop") -> Trajectory:
    return Trajectory(
        prompt_token_ids=np.zeros(3, np.int32),
        response_token_ids=np.zeros(length, np.int32),
        behaviour_log_probs=np.zeros(length, np.float32),
        version_spans=(VersionSpan(0, length),),
        finish_reason=finish_reason,
        text=f"worth {reward}",
        reward=reward,
    )


def group(*trajectories: Trajectory, source: str = "sums") -> Group:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"})
    return Group(Prompt("validation:0", messages, "2", source), trajectories)


def responses(*rewards: float, source: str = "sums") -> Group:
    return group(*(trajectory(reward) for reward in rewards), source=source)


def test_accuracy_counts_solved_responses_and_the_score_keeps_partial_credit():
    metrics = scalars(validation_metrics(ScoredGroups([responses(1.0, 0.5), responses(0.9, 0.0)], 0), n=2))

    assert metrics["val/mean@2"] == 0.25
    assert metrics["val/best@2"] == 0.5
    assert metrics["val/score/mean@2"] == pytest.approx(0.6)


def test_every_data_source_has_its_own_accuracy():
    scored = ScoredGroups([responses(1.0, 1.0, source="sums"), responses(0.0, 1.0, source="words")], 0)

    metrics = scalars(validation_metrics(scored, n=2))

    assert [metrics[f"val{source}/mean@2"] for source in ("", "/sums", "/words")] == [0.75, 1.0, 0.5]
    assert [metrics[f"val{source}/best@2"] for source in ("", "/sums", "/words")] == [1.0, 1.0, 1.0]


def test_groups_of_one_are_not_uniform() -> None:
    metrics = scalars(rollout_metrics(ScoredGroups([group(trajectory(1.0)), group(trajectory(0.0))], 0)))
    assert metrics["training/uniform_groups"] == 0


def test_rollout_metrics_are_computed_over_the_whole_batch():
    batch = [
        group(trajectory(1.0, length=4), trajectory(0.0, length=8, finish_reason="length")),
        group(trajectory(0.0, length=2), trajectory(0.0, length=2)),
        group(trajectory(1.0), trajectory(1.0)),
    ]

    metrics = scalars(rollout_metrics(ScoredGroups(batch, num_reward_timeouts=3)))

    assert metrics == pytest.approx(
        {
            "critic/score/mean": 0.5,
            "critic/score/max": 1.0,
            "response_length/mean": 20 / 6,
            "response_length/max": 8,
            "response_length/clip_ratio": 1 / 6,
            "training/uniform_groups": 2 / 3,
            "training/reward_timeouts": 3,
            "perf/total_num_tokens": 20 + 6 * 3,
        }
    )


def test_samples_are_the_first_responses_to_the_first_prompts():
    rows = samples([responses(0.5, 1.0), responses(0.0), responses(1.0)], step=7, num=2)

    assert [row["response"] for row in rows] == ["worth 0.5", "worth 0.0"]
    assert rows[0] == {
        "step": 7,
        "prompt": "Be brief.\n1 + 1",
        "response": "worth 0.5",
        "ground_truth": "2",
        "reward": 0.5,
        "finish_reason": "stop",
    }


def test_with_an_environment_turns_are_counted_and_samples_name_the_roles():
    def conversation(*contents: str) -> Trajectory:
        roles = ["assistant", "tool"] * len(contents)
        turns = tuple({"role": role, "content": content} for role, content in zip(roles, contents, strict=False))
        return replace(trajectory(1.0), turns=turns)

    several = conversation("<calculator>1 + 1</calculator>", "2", "<calculator>2</calculator>", "2", "2")
    scored = ScoredGroups([group(several, *(conversation(number) for number in "234"))], 0)

    without = replace(scored, groups=[without_contents(group) for group in scored.groups])
    assert validation_metrics(without, n=4) == validation_metrics(scored, n=4)
    assert len(pickle.dumps(without)) < 1000
    for metrics in (rollout_metrics(scored), validation_metrics(scored, n=4)):
        turns = {name: value for name, value in scalars(metrics).items() if name.startswith("num_turns/")}
        assert turns == {"num_turns/mean": 1.5, "num_turns/max": 3.0, "num_turns/multi_turn_ratio": 0.25}
    assert samples(scored.groups, step=1, num=1)[0]["response"] == (
        "assistant: <calculator>1 + 1</calculator>\ntool: 2\n"
        "assistant: <calculator>2</calculator>\ntool: 2\nassistant: 2"
    )
