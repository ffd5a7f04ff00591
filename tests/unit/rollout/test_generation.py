import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from megatron_bapo.errors import RunError
from megatron_bapo.records import Group, Prompt, Trajectory, VersionSpan
from megatron_bapo.rollout.generation import Send, generate_group
from megatron_bapo.rollout.in_flight_group import InFlightGroup, Reply, Sampling, create_in_flight_group
from megatron_bapo.rollout.messages import Completion, EngineLost, Generated, GenerationRequest
from megatron_bapo.rollout.quarantine import QuarantinedPrompt
from megatron_bapo.rollout.router import Router
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.simulation.modelled_engines import (
    END,
    SAMPLING,
    TOKEN_S,
    FaultyEngine,
    decode,
    log_prob,
    prompts,
    text_of,
)

GREEDY = replace(SAMPLING, temperature=0.0)


def in_flight(num: int, sampling: Sampling = SAMPLING, batch_seed: int = 11) -> list[InFlightGroup]:
    return [
        create_in_flight_group(p, sampling, batch_seed=batch_seed, index=i, prompt_serial=i)
        for i, p in enumerate(prompts(num))
    ]


async def finished(groups: list[InFlightGroup], engines: list[FaultyEngine], *, max_failures: int = 3) -> list[Group]:
    router = Router()
    for engine in engines:
        router.add(engine.name, engine, 10**9)
    await asyncio.gather(
        *(generate_group(group, router.generate, decode, max_failures=max_failures) for group in groups)
    )
    return [await group.group(decode) for group in groups]


def generate(num_engines: int, groups: list[InFlightGroup]) -> tuple[list[Group], list[FaultyEngine]]:
    engines = [FaultyEngine(f"engine {i}") for i in range(num_engines)]
    return run_in_virtual_time(finished(groups, engines)), engines


async def updated_twice(router: Router, engine: FaultyEngine, *, every_s: float) -> None:
    """Abort the requests and load newer weights, twice, each time after `every_s` seconds."""
    for version in (1, 2):
        await asyncio.sleep(every_s)
        router.pause()
        await router.abort(1.0)
        await router.drain(1.0)
        await engine.load_weights(version)
        router.resume()


class LosingRouter(Router):
    """Sends requests to modelled engines, of which one may be lost."""

    loses: int = 0
    """Number of requests after which the engine is lost once, with its tokens."""

    async def send(self, request: GenerationRequest, **options: object) -> tuple[str, Generated]:
        name, generated = await self.generate(request, **options)
        generated = self.reported(generated)
        self.loses -= 1
        if self.loses == 0:
            parts = tuple(replace(c, finish_reason="abort", text="") for c in generated.completions)
            raise EngineLost("lost", replace(generated, completions=parts))
        return name, generated

    def reported(self, generated: Generated) -> Generated:
        """Return what an engine reports of a request in flight."""
        return generated


async def generated_over_versions(router: Router, send: Send) -> Group:
    """Return a group whose requests were aborted for two weight updates."""
    engine, (group,) = FaultyEngine(mean_length=10**9), in_flight(1, GREEDY)
    router.add(engine.name, engine, 10**9)
    task = asyncio.ensure_future(generate_group(group, send, decode, max_failures=3))
    await updated_twice(router, engine, every_s=15.5 * TOKEN_S)
    await task
    return await group.group(decode)


async def partly_generated(router: Router, send: Send) -> InFlightGroup:
    """Return a group whose requests were aborted once, and then cancelled while the next ones were in flight."""
    engine, (group,) = FaultyEngine(mean_length=10**9), in_flight(1, GREEDY)
    router.add(engine.name, engine, 10**9)
    task = asyncio.ensure_future(generate_group(group, send, decode, max_failures=1))
    await asyncio.sleep(15.5 * TOKEN_S)
    await router.abort(1.0)
    await asyncio.sleep(1.5 * TOKEN_S)
    task.cancel()
    return group


def tokens(groups: list[Group]) -> list[list[list[int]]]:
    return [[t.response_token_ids.tolist() for t in group.trajectories] for group in groups]


@pytest.mark.parametrize("token_budget", [1, 3, 7, 49])
@pytest.mark.parametrize("num_engines", [1, 3])
def test_at_temperature_0_segments_add_up_to_the_uninterrupted_response(num_engines: int, token_budget: int):
    whole, _ = generate(1, in_flight(9, GREEDY))
    segmented, engines = generate(num_engines, in_flight(9, replace(GREEDY, token_budget=token_budget)))

    assert tokens(segmented) == tokens(whole)
    assert {t.finish_reason for group in whole for t in group.trajectories} == {"stop", "length"}
    for group, expected_group in zip(segmented, whole, strict=True):
        for found, expected in zip(group.trajectories, expected_group.trajectories, strict=True):
            assert (found.finish_reason, found.text) == (expected.finish_reason, expected.text)
            assert found.version_spans == expected.version_spans
            np.testing.assert_array_equal(found.behaviour_log_probs, expected.behaviour_log_probs)
    assert max(request.max_tokens for engine in engines for _, request in engine.log) == token_budget


def test_a_response_continues_under_the_newer_policy_and_every_token_keeps_its_version():
    async def main() -> Group:
        router, engine, (group,) = Router(), FaultyEngine(mean_length=10**9), in_flight(1, GREEDY)
        router.add(engine.name, engine, 10**9)
        task = asyncio.ensure_future(generate_group(group, router.generate, decode, max_failures=1))
        await updated_twice(router, engine, every_s=20.5 * TOKEN_S)  # the step under way is finished
        await task
        return await group.group(decode)

    for trajectory in run_in_virtual_time(main()).trajectories:
        assert trajectory.version_spans == (VersionSpan(0, 21), VersionSpan(1, 21), VersionSpan(2, 8))
        context = trajectory.prompt_token_ids.tolist()
        versions = [span.policy_version for span in trajectory.version_spans for _ in range(span.num_tokens)]
        for version, token, recorded in zip(
            versions, trajectory.response_token_ids.tolist(), trajectory.behaviour_log_probs, strict=True
        ):
            assert recorded == pytest.approx(log_prob(version, context, token))
            context.append(token)
        assert trajectory.text == text_of(trajectory.response_token_ids)


def test_a_groups_trajectories_start_as_one_request_and_stay_on_one_engine():
    _, engines = generate(3, in_flight(6, replace(SAMPLING, token_budget=5)))

    seen: dict[int, set[str]] = {}
    for engine in engines:
        for _, request in engine.log:
            seen.setdefault(request.prompt_token_ids[0], set()).add(engine.name)
            assert request.n == (2 if len(request.prompt_token_ids) == 2 else 1)
    assert all(len(names) == 1 for names in seen.values())
    assert set.union(*seen.values()) == {"engine 0", "engine 1", "engine 2"}


def test_unfinished_requests_of_a_dead_engine_continue_elsewhere_with_their_tokens():
    async def main() -> tuple[list[Group], FaultyEngine]:
        first, second = FaultyEngine("first"), FaultyEngine("second")
        work = asyncio.ensure_future(finished(in_flight(8, replace(GREEDY, token_budget=6)), [first, second]))
        await asyncio.sleep(9 * TOKEN_S)
        first.die()
        return await work, second

    groups, second = run_in_virtual_time(main())
    assert tokens(groups) == tokens(generate(1, in_flight(8, GREEDY))[0])
    from_first = [r for at, r in second.log if at == pytest.approx(9 * TOKEN_S)]
    assert from_first
    assert all(len(request.prompt_token_ids) == 2 + 6 for request in from_first)


def test_reported_tokens_of_a_dead_engine_are_not_generated_again():
    """The engine last reports after 9 tokens and dies after 15."""

    async def main() -> tuple[list[Group], FaultyEngine]:
        router, first, second = (
            Router(),
            FaultyEngine("first", mean_length=40),
            FaultyEngine("second", mean_length=40),
        )
        groups = in_flight(8, GREEDY)
        for engine in (first, second):
            router.add(engine.name, engine, 10**9)
        work = asyncio.gather(*(generate_group(group, router.generate, decode, max_failures=2) for group in groups))
        for num_steps in (3.5, 4.5):  # the engine reports after its current step
            await asyncio.sleep(num_steps * TOKEN_S)
            router.record_partial(await router.on_every(lambda engine: engine.progress()))
        await asyncio.sleep(6 * TOKEN_S)
        first.die()
        await work
        return [await group.group(decode) for group in groups], second

    groups, second = run_in_virtual_time(main())
    expected = run_in_virtual_time(finished(in_flight(8, GREEDY), [FaultyEngine("one", mean_length=40)]))
    assert tokens(groups) == tokens(expected)
    assert [[t.text for t in group.trajectories] for group in groups] == [
        [t.text for t in group.trajectories] for group in expected
    ]
    from_first = [len(r.prompt_token_ids) - 2 for at, r in second.log if at == pytest.approx(15 * TOKEN_S)]
    assert from_first
    assert set(from_first) == {9}


def test_a_response_on_which_every_engine_dies_is_quarantined_even_if_it_makes_progress():
    async def main() -> None:
        router, (group,) = Router(), in_flight(1, replace(GREEDY, n=1))
        engines = [FaultyEngine(f"engine {i}", mean_length=10**9) for i in range(4)]
        for engine in engines:
            router.add(engine.name, engine, 10**9)
        work = asyncio.ensure_future(generate_group(group, router.generate, decode, max_failures=3))
        for _ in range(3):
            await asyncio.sleep(5 * TOKEN_S)
            router.record_partial(await router.on_every(lambda engine: engine.progress()))
            (busy,) = (engine for engine in engines if engine.num_in_flight and not engine.dead)
            busy.die()
            await asyncio.sleep(0.0)
        with pytest.raises(QuarantinedPrompt, match="failed 3 times"):
            await work

    run_in_virtual_time(main())


def test_a_request_that_fails_repeatedly_is_quarantined_with_its_reason():
    async def main() -> None:
        engines = [FaultyEngine("engine 0", fails_on={1}), FaultyEngine("engine 1", fails_on={1})]
        with pytest.raises(QuarantinedPrompt, match="prompt train:0 failed 4 times, the last time with: engine") as e:
            await finished(in_flight(1), engines, max_failures=4)
        assert len(e.value.failures) == sum(len(engine.log) for engine in engines) == 4

    run_in_virtual_time(main())


def test_a_request_that_fails_once_is_sent_again_with_the_same_seed():
    async def main() -> list[Group]:
        router, bad, (group,) = Router(), FaultyEngine("bad", fails_on={1}), in_flight(1)
        router.add(bad.name, bad, 10**9)

        async def send(request: GenerationRequest, *, prompt_serial: int, prefer: str | None, alone: bool):
            if bad.log:
                bad.fails_on.clear()
            return await router.generate(request, prompt_serial=prompt_serial, prefer=prefer, alone=alone)

        await generate_group(group, send, decode, max_failures=2)
        assert len({request.request_id for _, request in bad.log}) == 2
        return [await group.group(decode)]

    assert tokens(run_in_virtual_time(main())) == tokens(generate(1, in_flight(1))[0])


def test_a_trajectory_has_the_engines_output_and_no_reward_yet():
    (group,), (engine,) = generate(1, in_flight(1))

    (_, request) = engine.log[0]
    completion = run_in_virtual_time(FaultyEngine().generate(request)).completions[1]
    second = group.trajectories[1]
    assert second.prompt_token_ids.tolist() == [1, 100]
    np.testing.assert_array_equal(second.response_token_ids, completion.token_ids)
    np.testing.assert_array_equal(second.behaviour_log_probs, completion.log_probs)
    assert (second.finish_reason, second.text) == (completion.finish_reason, completion.text)
    assert math.isnan(second.reward)


def test_a_finished_group_and_its_responses_in_flight_share_one_block_of_memory():
    """The engines' replies are freed although the group stays in flight until it is scored."""
    groups = in_flight(1, replace(SAMPLING, token_budget=3))
    ((group,), _) = generate(1, groups)
    blocks = {id(array.base) for t in group.trajectories for array in (t.response_token_ids, t.behaviour_log_probs)}

    assert len(blocks) == 1
    for partial, trajectory in zip(groups[0].trajectories, group.trajectories, strict=True):
        assert len(partial.segments) > 1
        for segment in partial.sampled:
            assert np.shares_memory(segment.token_ids, trajectory.response_token_ids)
            assert np.shares_memory(segment.log_probs, trajectory.behaviour_log_probs)


def test_a_request_carries_the_sampling_parameters():
    _, (engine,) = generate(1, in_flight(1))

    request = engine.log[0][1]
    assert (request.n, request.temperature, request.max_tokens) == (2, 0.7, 50)
    assert (request.top_p, request.top_k, request.min_p) == (0.9, 20, 0.1)


def seeds(num_engines: int, groups: list[InFlightGroup]) -> dict[str, int]:
    _, engines = generate(num_engines, groups)
    return {request.request_id: request.seed for engine in engines for _, request in engine.log}


def test_seeds_differ_between_requests_and_do_not_depend_on_the_number_of_engines():
    by_request = seeds(1, in_flight(50, replace(SAMPLING, token_budget=9)))

    assert len(by_request) > 100
    assert len(set(by_request.values())) == len(by_request)
    assert all(0 <= seed < 2**31 for seed in by_request.values())
    assert seeds(3, in_flight(50, replace(SAMPLING, token_budget=9))) == by_request


def test_a_prompt_that_comes_twice_in_a_batch_or_in_another_batch_gets_another_seed():
    (prompt,) = prompts(1)
    places = [(11, 0), (11, 1), (12, 0)]
    groups = [create_in_flight_group(prompt, SAMPLING, batch_seed=seed, index=i, prompt_serial=0) for seed, i in places]

    assert len(set(seeds(1, groups).values())) == 3


def test_seeds_are_the_same_in_every_process_and_release():
    assert seeds(1, in_flight(1)) == {"11:0:train:0#0": 2052504237}


def always_returning(completions: tuple[Completion, ...]) -> Callable[..., Awaitable[tuple[str, Generated]]]:
    async def send(
        request: GenerationRequest, *, prompt_serial: int, prefer: str | None, alone: bool
    ) -> tuple[str, Generated]:
        return "engine 0", Generated(0, completions)

    return send


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((1, 0), "returned a completion without tokens for prompt train:0"),
        ((1,), "returned 1 completions for prompt train:0, not 2"),
    ],
)
def test_an_incomplete_output_counts_as_an_engine_failure_and_names_the_prompt(lengths: tuple[int, ...], message: str):
    completions = tuple(
        Completion(np.zeros(size, np.int32), np.zeros(size, np.float32), "stop", "") for size in lengths
    )
    (group,) = in_flight(1)
    with pytest.raises(RunError, match=message):
        run_in_virtual_time(generate_group(group, always_returning(completions), decode, max_failures=1))


CONVERSING = replace(GREEDY, max_response_length=100)


@dataclass
class Echo:
    """Replies to every turn with tokens that the modelled policy never samples."""

    max_turns: int = 4
    num_tokens: int = 3
    seconds: float = 0.05
    conversations: list[list[dict[str, str]]] = field(default_factory=list)

    async def reply(self, prompt: Prompt, turns: Sequence[dict[str, str]]) -> Reply | None:
        self.conversations.append([*turns])
        await asyncio.sleep(self.seconds)
        token = 200 + len(turns)
        return Reply({"role": "tool", "content": str(token)}, np.full(self.num_tokens, token, np.int32))


async def conversed(
    groups: list[InFlightGroup], engines: list[FaultyEngine], environment: Echo, router: Router | None = None
) -> list[Group]:
    router = router or Router()
    for engine in engines:
        router.add(engine.name, engine, 10**9)
    await asyncio.gather(
        *(generate_group(group, router.generate, decode, environment, max_failures=3) for group in groups)
    )
    return [await group.group(decode) for group in groups]


def converse(sampling: Sampling, environment: Echo, num_engines: int = 1) -> list[Trajectory]:
    engines = [FaultyEngine(f"engine {i}") for i in range(num_engines)]
    groups = run_in_virtual_time(conversed(in_flight(9, sampling), engines, environment))
    return [trajectory for group in groups for trajectory in group.trajectories]


def check_turns(trajectory: Trajectory, max_turns: int, max_response_length: int) -> None:
    """Mask, turns, versions and log-probs of one trajectory are exact."""
    tokens, positions = trajectory.response_token_ids, trajectory.sampled_positions
    assert len(tokens) <= max_response_length
    mask = tokens < 200
    np.testing.assert_array_equal(positions, np.flatnonzero(mask))
    assert mask[-1]
    assert trajectory.num_sampled == len(trajectory.behaviour_log_probs) == mask.sum()
    versions = [span.policy_version for span in trajectory.version_spans for _ in range(span.num_tokens)]
    context = trajectory.prompt_token_ids.tolist() + tokens.tolist()
    for position, version, recorded in zip(positions, versions, trajectory.behaviour_log_probs, strict=True):
        assert recorded == pytest.approx(log_prob(version, context[: 2 + position], tokens[position]))
    edges = np.flatnonzero(np.diff(mask.astype(int))) + 1
    parts = np.split(tokens, edges)
    texts = [text_of(part) if part[0] < 200 else str(part[0]) for part in parts]
    assert [turn["content"] for turn in trajectory.turns] == texts
    assert [turn["role"] for turn in trajectory.turns] == (["assistant", "tool"] * max_turns)[: len(parts)]
    assert len(parts) <= 2 * max_turns - 1
    assert trajectory.final_text == texts[-1]
    assert all(part[-1] == END for part in parts[:-1:2])
    assert trajectory.finish_reason == ("stop" if tokens[-1] == END and len(parts) == 2 * max_turns - 1 else "length")


@pytest.mark.parametrize("token_budget", [None, 1, 7])
def test_an_environment_replies_between_turns_and_its_tokens_are_masked(token_budget: int | None):
    environment = Echo()
    trajectories = converse(replace(CONVERSING, token_budget=token_budget), environment, num_engines=2)

    for trajectory in trajectories:
        check_turns(trajectory, max_turns=4, max_response_length=100)
    assert {t.finish_reason for t in trajectories} == {"stop", "length"}
    whole = converse(CONVERSING, Echo())
    assert [t.response_token_ids.tolist() for t in trajectories] == [t.response_token_ids.tolist() for t in whole]
    assert all(turns[-1]["role"] == "assistant" and len(turns) % 2 for turns in environment.conversations)


def test_a_reply_without_room_for_a_next_turn_is_left_out():
    for trajectory in converse(CONVERSING, Echo(num_tokens=99)):
        assert trajectory.loss_mask is None
        assert trajectory.finish_reason == "length"
        assert len(trajectory.turns) == 1


def test_a_trajectory_whose_engine_dies_in_its_second_turn_continues_elsewhere_with_all_turns():
    async def main() -> tuple[list[Group], list[GenerationRequest]]:
        first, second, environment = FaultyEngine("first"), FaultyEngine("second"), Echo()
        groups = in_flight(8, replace(CONVERSING, token_budget=6))
        work = asyncio.ensure_future(conversed(groups, [first, second], environment))
        while not any(
            len(partial.turns) == 2 and len(partial.turn_segments) == 1 for g in groups for partial in g.trajectories
        ):
            await asyncio.sleep(TOKEN_S / 2)
        first.die()
        at = asyncio.get_running_loop().time()
        done = await work
        return done, [request for when, request in second.log if when >= at]

    groups, moved = run_in_virtual_time(main())
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    for trajectory in trajectories:
        check_turns(trajectory, max_turns=4, max_response_length=100)
    expected = [
        t
        for g in run_in_virtual_time(conversed(in_flight(8, CONVERSING), [FaultyEngine()], Echo()))
        for t in g.trajectories
    ]
    assert [t.response_token_ids.tolist() for t in trajectories] == [t.response_token_ids.tolist() for t in expected]
    assert any((request.prompt_token_ids >= 200).any() and request.prompt_token_ids[-1] < 200 for request in moved)


def test_a_turn_interrupted_by_a_weight_update_continues_and_a_pending_reply_is_not_lost():
    async def main() -> Group:
        router, engine, (group,) = Router(), FaultyEngine(), in_flight(1, CONVERSING)
        task = asyncio.ensure_future(conversed([group], [engine], Echo(seconds=0.3), router))
        for version in range(1, 9):
            await asyncio.sleep(0.11)
            router.pause()
            await router.abort(1.0)
            await router.drain(1.0)
            await engine.load_weights(version)
            router.resume()
        (done,) = await task
        return done

    for trajectory in run_in_virtual_time(main()).trajectories:
        check_turns(trajectory, max_turns=4, max_response_length=100)
        assert len(trajectory.version_spans) > 1
        assert trajectory.loss_mask is not None
