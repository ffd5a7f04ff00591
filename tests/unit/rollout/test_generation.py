import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest

from megatron_bapo.config.schema import RewardConfig
from megatron_bapo.errors import RunError
from megatron_bapo.records import Group, VersionSpan
from megatron_bapo.rewards.scorer import Scorer
from megatron_bapo.rollout.generation import (
    GrowingGroup,
    Sampling,
    SetAside,
    grow,
    growing_group,
    score_groups,
)
from megatron_bapo.rollout.messages import Completion, Generated, GenerationRequest
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.virtual_time import run_in_virtual_time
from tests.unit.rollout.modelled_engines import SAMPLING, TOKEN_S, ModelledEngine, decode, log_prob, prompts

GREEDY = replace(SAMPLING, temperature=0.0)
REWARD_MODULE = """
import time

def matches(data_source, solution_str, ground_truth, extra_info=None):
    if "7" in solution_str:
        time.sleep(60)
    return float(solution_str == ground_truth)
"""


def growing(num: int, sampling: Sampling = SAMPLING, batch_seed: int = 11) -> list[GrowingGroup]:
    return [growing_group(p, sampling, batch_seed=batch_seed, index=i, order=i) for i, p in enumerate(prompts(num))]


async def finished(groups: list[GrowingGroup], engines: list[ModelledEngine], *, max_failures: int = 3) -> list[Group]:
    router = Router()
    for engine in engines:
        router.add(engine.name, engine, 10**9)
    await asyncio.gather(*(grow(group, router.generate, max_failures=max_failures) for group in groups))
    return [group.group(decode) for group in groups]


def generate(num_engines: int, groups: list[GrowingGroup]) -> tuple[list[Group], list[ModelledEngine]]:
    engines = [ModelledEngine(f"engine {i}") for i in range(num_engines)]
    return run_in_virtual_time(finished(groups, engines)), engines


def tokens(groups: list[Group]) -> list[list[list[int]]]:
    return [[t.response_token_ids.tolist() for t in group.trajectories] for group in groups]


@pytest.mark.parametrize("token_budget", [1, 3, 7, 49])
@pytest.mark.parametrize("num_engines", [1, 3])
def test_at_temperature_0_segments_add_up_to_the_uninterrupted_answer(num_engines: int, token_budget: int):
    whole, _ = generate(1, growing(9, GREEDY))
    pieces, engines = generate(num_engines, growing(9, replace(GREEDY, token_budget=token_budget)))

    assert tokens(pieces) == tokens(whole)
    assert {t.finish_reason for group in whole for t in group.trajectories} == {"stop", "length"}
    for ours, theirs in zip(pieces, whole, strict=True):
        for piece, answer in zip(ours.trajectories, theirs.trajectories, strict=True):
            assert (piece.finish_reason, piece.text) == (answer.finish_reason, answer.text)
            assert piece.version_spans == answer.version_spans
            np.testing.assert_array_equal(piece.behaviour_log_probs, answer.behaviour_log_probs)
    assert max(request.max_tokens for engine in engines for _, request in engine.log) == token_budget


def test_an_answer_goes_on_under_the_newer_policy_and_every_token_knows_its_version():
    async def main() -> Group:
        router, engine, (group,) = Router(), ModelledEngine(mean_length=10**9), growing(1, GREEDY)
        router.add(engine.name, engine, 10**9)
        task = asyncio.ensure_future(grow(group, router.generate, max_failures=1))
        for version in (1, 2):
            await asyncio.sleep(20.5 * TOKEN_S)
            router.pause()
            await router.abort(1.0)
            await router.drain(1.0)
            await engine.load_weights(version)
            router.resume()
        await task
        return group.group(decode)

    for trajectory in run_in_virtual_time(main()).trajectories:
        assert trajectory.version_spans == (VersionSpan(0, 20), VersionSpan(1, 20), VersionSpan(2, 10))
        context = trajectory.prompt_token_ids.tolist()
        versions = [span.policy_version for span in trajectory.version_spans for _ in range(span.num_tokens)]
        for version, token, said in zip(
            versions, trajectory.response_token_ids.tolist(), trajectory.behaviour_log_probs, strict=True
        ):
            assert said == pytest.approx(log_prob(version, context, token))
            context.append(token)
        assert trajectory.text == decode(trajectory.response_token_ids)


def test_a_groups_answers_start_as_one_request_and_stay_on_one_engine():
    _, engines = generate(3, growing(6, replace(SAMPLING, token_budget=5)))

    seen: dict[int, set[str]] = {}
    for engine in engines:
        for _, request in engine.log:
            seen.setdefault(request.prompt_token_ids[0], set()).add(engine.name)
            assert request.n == (2 if len(request.prompt_token_ids) == 2 else 1)
    assert all(len(names) == 1 for names in seen.values())
    assert set.union(*seen.values()) == {"engine 0", "engine 1", "engine 2"}


def test_unfinished_requests_of_a_dead_engine_go_on_elsewhere_with_the_tokens_that_they_had():
    async def main() -> tuple[list[Group], ModelledEngine]:
        first, second = ModelledEngine("first"), ModelledEngine("second")
        work = asyncio.ensure_future(finished(growing(8, replace(GREEDY, token_budget=6)), [first, second]))
        await asyncio.sleep(9 * TOKEN_S)
        first.die()
        return await work, second

    groups, second = run_in_virtual_time(main())
    assert tokens(groups) == tokens(generate(1, growing(8, GREEDY))[0])
    from_first = [r for at, r in second.log if at == pytest.approx(9 * TOKEN_S)]
    assert from_first
    assert all(len(request.prompt_token_ids) == 2 + 6 for request in from_first)


def test_what_a_dead_engine_had_told_of_its_answers_is_not_generated_again():
    """Its last word was after 9 tokens; it dies after 15."""

    async def main() -> tuple[list[Group], ModelledEngine]:
        router, first, second = (
            Router(),
            ModelledEngine("first", mean_length=40),
            ModelledEngine("second", mean_length=40),
        )
        groups = growing(8, GREEDY)
        for engine in (first, second):
            router.add(engine.name, engine, 10**9)
        work = asyncio.gather(*(grow(group, router.generate, max_failures=2) for group in groups))
        for at in (4, 5):
            await asyncio.sleep(at * TOKEN_S)
            router.keep(await router.on_every(lambda engine: engine.progress()))
        await asyncio.sleep(6 * TOKEN_S)
        first.die()
        await work
        return [group.group(decode) for group in groups], second

    groups, second = run_in_virtual_time(main())
    expected = run_in_virtual_time(finished(growing(8, GREEDY), [ModelledEngine("one", mean_length=40)]))
    assert tokens(groups) == tokens(expected)
    assert [[t.text for t in group.trajectories] for group in groups] == [
        [t.text for t in group.trajectories] for group in expected
    ]
    from_first = [len(r.prompt_token_ids) - 2 for at, r in second.log if at == pytest.approx(15 * TOKEN_S)]
    assert from_first
    assert set(from_first) == {9}


def test_an_answer_at_which_every_engine_dies_is_set_aside_however_far_it_comes():
    async def main() -> None:
        router, (group,) = Router(), growing(1, replace(GREEDY, n=1))
        engines = [ModelledEngine(f"engine {i}", mean_length=10**9) for i in range(4)]
        for engine in engines:
            router.add(engine.name, engine, 10**9)
        work = asyncio.ensure_future(grow(group, router.generate, max_failures=3))
        for _ in range(3):
            await asyncio.sleep(5 * TOKEN_S)
            router.keep(await router.on_every(lambda engine: engine.progress()))
            (busy,) = (engine for engine in engines if engine.num_in_flight and not engine.dead)
            busy.die()
            await asyncio.sleep(0.0)
        with pytest.raises(SetAside, match="failed 3 times"):
            await work

    run_in_virtual_time(main())


def test_a_request_that_fails_again_and_again_is_set_aside_and_says_why():
    async def main() -> None:
        engines = [ModelledEngine("engine 0", fails_on={1}), ModelledEngine("engine 1", fails_on={1})]
        with pytest.raises(SetAside, match="prompt train:0 failed 4 times, the last time with: engine") as e:
            await finished(growing(1), engines, max_failures=4)
        assert len(e.value.failures) == sum(len(engine.log) for engine in engines) == 4

    run_in_virtual_time(main())


def test_a_request_that_fails_once_is_answered_with_the_same_seed():
    async def main() -> list[Group]:
        router, bad, (group,) = Router(), ModelledEngine("bad", fails_on={1}), growing(1)
        router.add(bad.name, bad, 10**9)

        async def mended(request: GenerationRequest, *, order: int, prefer: str | None):
            if bad.log:
                bad.fails_on.clear()
            return await router.generate(request, order=order, prefer=prefer)

        await grow(group, mended, max_failures=2)
        assert len({request.request_id for _, request in bad.log}) == 2
        return [group.group(decode)]

    assert tokens(run_in_virtual_time(main())) == tokens(generate(1, growing(1))[0])


def test_a_trajectory_keeps_what_the_engine_said_and_awaits_its_reward():
    (group,), (engine,) = generate(1, growing(1))

    (_, request) = engine.log[0]
    said = run_in_virtual_time(ModelledEngine().generate(request)).completions[1]
    second = group.trajectories[1]
    assert second.prompt_token_ids.tolist() == [1, 100]
    np.testing.assert_array_equal(second.response_token_ids, said.token_ids)
    np.testing.assert_array_equal(second.behaviour_log_probs, said.log_probs)
    assert (second.finish_reason, second.text) == (said.finish_reason, said.text)
    assert math.isnan(second.reward)


def test_a_request_carries_the_sampling_parameters():
    _, (engine,) = generate(1, growing(1))

    request = engine.log[0][1]
    assert (request.n, request.temperature, request.max_tokens) == (2, 0.7, 50)
    assert (request.top_p, request.top_k, request.min_p) == (0.9, 20, 0.1)


def seeds(num_engines: int, groups: list[GrowingGroup]) -> dict[str, int]:
    _, engines = generate(num_engines, groups)
    return {request.request_id: request.seed for engine in engines for _, request in engine.log}


def test_seeds_differ_between_requests_and_do_not_depend_on_the_number_of_engines():
    by_request = seeds(1, growing(50, replace(SAMPLING, token_budget=9)))

    assert len(by_request) > 100
    assert len(set(by_request.values())) == len(by_request)
    assert all(0 <= seed < 2**31 for seed in by_request.values())
    assert seeds(3, growing(50, replace(SAMPLING, token_budget=9))) == by_request


def test_a_prompt_that_comes_twice_in_a_batch_or_in_another_batch_gets_another_seed():
    (prompt,) = prompts(1)
    places = [(11, 0), (11, 1), (12, 0)]
    groups = [growing_group(prompt, SAMPLING, batch_seed=seed, index=i, order=0) for seed, i in places]

    assert len(set(seeds(1, groups).values())) == 3


def test_seeds_are_the_same_in_every_process_and_release():
    assert seeds(1, growing(1)) == {"11:0:train:0#0": 2052504237}


def answering(completions: tuple[Completion, ...]) -> Callable[..., Awaitable[tuple[str, Generated]]]:
    async def send(request: GenerationRequest, *, order: int, prefer: str | None) -> tuple[str, Generated]:
        return "engine 0", Generated(0, completions)

    return send


@pytest.mark.parametrize(
    ("lengths", "message"),
    [((1, 0), "answered prompt train:0 without a single token"), ((1,), "gave prompt train:0 1 answers instead of 2")],
)
def test_an_answer_that_is_none_is_the_engines_failure_and_names_the_prompt(lengths: tuple[int, ...], message: str):
    completions = tuple(
        Completion(np.zeros(size, np.int32), np.zeros(size, np.float32), "stop", "") for size in lengths
    )
    (group,) = growing(1)
    with pytest.raises(RunError, match=message):
        run_in_virtual_time(grow(group, answering(completions), max_failures=1))


def test_rewards_stand_on_the_answers_that_earned_them_and_timeouts_are_counted(tmp_path, monkeypatch):
    (tmp_path / "generation_test_rewards.py").write_text(REWARD_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    texts = [["truth 0", "other"], ["truth 1", "7"]]
    groups, _ = generate(2, growing(2))
    groups = [
        Group(group.prompt, tuple(replace(t, text=text) for t, text in zip(group.trajectories, said, strict=True)))
        for group, said in zip(groups, texts, strict=True)
    ]
    config = RewardConfig(
        type="function", function="generation_test_rewards:matches", timeout_s=2.0, timeout_reward=-1.0, num_workers=2
    )

    with Scorer(config) as scorer:
        scored = score_groups(groups, scorer)

    assert [[t.reward for t in group.trajectories] for group in scored.groups] == [[1.0, 0.0], [1.0, -1.0]]
    assert scored.num_reward_timeouts == 1
    assert [[t.text for t in g.trajectories] for g in scored.groups] == texts
