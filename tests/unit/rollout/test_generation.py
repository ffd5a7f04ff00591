import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_bapo.config.schema import RewardConfig
from megatron_bapo.errors import RunError
from megatron_bapo.records import Group, Prompt, VersionSpan
from megatron_bapo.rewards.scorer import Scorer
from megatron_bapo.rollout.generation import GenerateMany, Sampling, generate_groups, score_groups
from megatron_bapo.rollout.messages import Completion, Generated, GenerationRequest
from megatron_bapo.rollout.tokenization import TokenizedPrompt

SAMPLING = Sampling(n=2, temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, max_response_length=5, seed=11)
REWARD_MODULE = """
import time

def matches(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == extra_info["hangs_on"]:
        time.sleep(60)
    return float(solution_str == ground_truth)
"""


def prompts(num: int) -> list[TokenizedPrompt]:
    return [
        TokenizedPrompt(
            Prompt(
                prompt_id=f"train:{i}",
                messages=({"role": "user", "content": str(i)},),
                ground_truth=f"answer 0 to {i}",
                data_source="counting",
                extra_info={"hangs_on": "answer 1 to 2"},
            ),
            np.array([i, 100], np.int32),
        )
        for i in range(num)
    ]


def completion(text: str, num_tokens: int) -> Completion:
    return Completion(np.arange(num_tokens, dtype=np.int32), np.full(num_tokens, -0.5, np.float32), "stop", text)


def echo(policy_version: int, log: list[list[GenerationRequest]]) -> GenerateMany:
    """An engine that names the prompt in its answers, and the later ones are the faster."""

    async def generate(requests: list[GenerationRequest]) -> list[Generated]:
        log.append(requests)
        await asyncio.sleep(0.01 / (1 + policy_version))
        return [
            Generated(
                policy_version,
                tuple(completion(f"answer {k} to {r.prompt_token_ids[0]}", k + 1) for k in range(r.n)),
            )
            for r in requests
        ]

    return generate


def generate(
    num_engines: int, tokenized: Sequence[TokenizedPrompt], sampling: Sampling = SAMPLING
) -> tuple[list[Group], list[list[GenerationRequest]]]:
    log: list[list[GenerationRequest]] = []
    engines = [echo(version, log) for version in range(num_engines)]
    return asyncio.run(generate_groups(engines, tokenized, sampling)), log


@pytest.mark.parametrize("num_prompts", [1, 2, 7])
@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_every_group_is_that_of_its_prompt_whichever_engine_answered(num_engines, num_prompts):
    tokenized = prompts(num_prompts)

    groups, log = generate(num_engines, tokenized)

    assert [group.prompt for group in groups] == [t.prompt for t in tokenized]
    assert [[t.text for t in group.trajectories] for group in groups] == [
        [f"answer 0 to {i}", f"answer 1 to {i}"] for i in range(num_prompts)
    ]
    assert sum(map(len, log)) == num_prompts
    assert max(map(len, log)) - min(map(len, log)) <= 1


def test_a_trajectory_keeps_what_the_engine_said_and_awaits_its_reward():
    (group,), _ = generate(1, prompts(1))

    second = group.trajectories[1]
    assert second.prompt_token_ids.tolist() == [0, 100]
    assert second.response_token_ids.tolist() == [0, 1]
    assert second.behaviour_log_probs.tolist() == [-0.5, -0.5]
    assert second.version_spans == (VersionSpan(0, 2),)
    assert second.finish_reason == "stop"
    assert math.isnan(second.reward)


def test_each_trajectory_names_the_policy_version_that_sampled_it():
    groups, _ = generate(3, prompts(3))

    versions = [span.policy_version for group in groups for t in group.trajectories for span in t.version_spans]
    assert versions == [0, 0, 1, 1, 2, 2]


def test_a_request_carries_the_sampling_parameters():
    _, ((request,),) = generate(1, prompts(1))

    assert (request.n, request.temperature, request.max_tokens) == (2, 0.7, 5)
    assert (request.top_p, request.top_k, request.min_p) == (0.9, 20, 0.1)


def seeds(num_engines: int, tokenized: Sequence[TokenizedPrompt], batch_seed: int = 11) -> dict[str, int]:
    _, log = generate(num_engines, tokenized, replace(SAMPLING, seed=batch_seed))
    return {request.request_id: request.seed for requests in log for request in requests}


def test_seeds_differ_between_prompts_and_do_not_depend_on_the_number_of_engines():
    by_request = seeds(1, prompts(50))

    assert len(set(by_request.values())) == 50
    assert all(0 <= seed < 2**31 for seed in by_request.values())
    assert seeds(3, prompts(50)) == by_request


def test_a_prompt_that_comes_twice_in_a_batch_or_in_another_batch_gets_another_seed():
    (prompt,) = prompts(1)

    assert len(set(seeds(1, [prompt, prompt]).values())) == 2
    assert not set(seeds(1, [prompt], batch_seed=11).values()) & set(seeds(1, [prompt], batch_seed=12).values())


def test_seeds_are_the_same_in_every_process_and_release():
    assert seeds(1, prompts(1)) == {"11:0:train:0": 2052504237}


def test_an_answer_without_a_token_is_the_engines_failure_and_names_the_prompt():
    async def silent(requests: list[GenerationRequest]) -> list[Generated]:
        return [Generated(0, (completion("", 0),)) for _ in requests]

    with pytest.raises(RunError, match="an engine answered prompt train:0 without a single token"):
        asyncio.run(generate_groups([silent], prompts(1), SAMPLING))


def test_rewards_stand_on_the_answers_that_earned_them_and_timeouts_are_counted(tmp_path, monkeypatch):
    (tmp_path / "generation_test_rewards.py").write_text(REWARD_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    groups, _ = generate(2, prompts(3))
    config = RewardConfig(
        type="function", function="generation_test_rewards:matches", timeout_s=2.0, timeout_reward=-1.0, num_workers=2
    )

    with Scorer(config) as scorer:
        scored = score_groups(groups, scorer)

    rewards = [[t.reward for t in group.trajectories] for group in scored.groups]
    assert rewards == [[1.0, 0.0], [1.0, 0.0], [1.0, -1.0]]
    assert scored.num_reward_timeouts == 1
    assert [[t.text for t in g.trajectories] for g in scored.groups] == [
        [t.text for t in g.trajectories] for g in groups
    ]
