import asyncio
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NoReturn

import numpy as np
import pytest

from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, Prompt
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.in_flight_group import Reply
from megatron_bapo.rollout.messages import Generated, GenerationRequest
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.rollout.world import GREEDY, UPDATE_S, World, settings
from tests.unit.simulation.modelled_engines import LOAD_S, TOKEN_S, prompts


def trained(num_steps: int, world_values: dict[str, Any] | None = None, **values: Any) -> list[ScoredGroups]:
    async def main() -> list[ScoredGroups]:
        world = World(settings(**values), **(world_values or {}))
        try:
            return await world.train(num_steps)
        finally:
            await world.scheduler.close()

    return run_in_virtual_time(main())


def contents(batches: list[ScoredGroups]) -> list[list[Any]]:
    return [
        [
            (g.prompt.prompt_id, [(t.response_token_ids.tolist(), t.version_spans, t.reward) for t in g.trajectories])
            for g in batch.groups
        ]
        for batch in batches
    ]


def prompt_ids(batches: list[ScoredGroups]) -> list[list[str]]:
    return [[group.prompt.prompt_id for group in batch.groups] for batch in batches]


def names(batches: list[ScoredGroups]) -> list[str]:
    return [name for batch in prompt_ids(batches) for name in batch]


def stream_order(num: int, num_prompts: int = 40) -> list[str]:
    stream = PromptStream([p.prompt for p in prompts(num_prompts)], seed=3, shuffle=True)
    return [p.prompt_id for p in stream.take(num)]


def ages(batches: list[ScoredGroups]) -> list[int]:
    """The age of the oldest token of each batch, by the spans."""
    return [
        step - min(s.policy_version for g in batch.groups for t in g.trajectories for s in t.version_spans)
        for step, batch in enumerate(batches)
    ]


def test_sync_generates_only_the_requested_groups_in_the_order_of_the_stream():
    async def main() -> None:
        world = World(settings())
        batches = await world.train(3)
        await asyncio.sleep(100.0)
        assert world.stream.num_taken == 18
        assert names(batches) == stream_order(18)
        assert ages(batches) == [0, 0, 0]
        await world.scheduler.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize("temperature", [GREEDY, 1.0])
def test_async_with_max_staleness_0_gives_the_groups_of_sync(temperature: float):
    expected = contents(trained(5, temperature=temperature))
    assert contents(trained(5, temperature=temperature, mode="async", max_staleness=0)) == expected


@pytest.mark.parametrize("on_weight_update", ["drain", "abort_and_resume", "keep"])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_async_generates_while_the_trainer_trains_and_no_group_exceeds_max_staleness(max_staleness, on_weight_update):
    batches = trained(
        12,
        {"mean_length": 60},
        mode="async",
        max_staleness=max_staleness,
        on_weight_update=on_weight_update,
        max_response_length=300,
    )
    assert max(ages(batches)) <= max_staleness
    assert max(ages(batches)) > 0
    for step, batch in enumerate(batches):
        metrics = scalars(batch.metrics)
        assert metrics["rollout/staleness/max"] == ages(batches)[step]
        counts = {name.rsplit("/")[-1]: value for name, value in metrics.items() if "accounting" in name}
        assert counts.pop("taken") == sum(counts.values())
        assert counts["trained"] == 6 * (step + 1)


def duration(num_steps: int, **values: Any) -> float:
    async def main() -> float:
        world = World(settings(max_response_length=400, **values), mean_length=150)
        await world.train(num_steps)
        await world.scheduler.close()
        return asyncio.get_running_loop().time()

    return run_in_virtual_time(main())


def test_async_takes_less_time_than_sync_and_partial_rollouts_less_than_whole_responses():
    sync = duration(10)
    assert duration(10, mode="async") < 0.8 * sync
    partial = {"token_budget": 40, "over_sampling": 2.0}
    assert duration(10, partial_rollout=partial, max_staleness=4, on_weight_update="abort_and_resume") < 0.9 * sync


def test_no_prompt_is_started_whose_group_would_be_too_old():
    """With max_staleness=1, at most two batches of groups are started, and one more while the trainer trains."""

    async def main() -> None:
        world = World(settings(mode="async"))
        assert world.stream.num_taken == 0
        await world.scheduler.take()
        assert world.stream.num_taken == 6 + 6
        await asyncio.sleep(100.0)
        assert world.stream.num_taken == 6 + 6
        await world.update_weights()
        assert world.stream.num_taken == 6 + 12
        await world.scheduler.close()

    run_in_virtual_time(main())


def test_over_sampled_responses_keep_their_tokens_over_steps():
    batches = trained(
        8,
        {"mean_length": 100},
        partial_rollout={"token_budget": 16, "over_sampling": 1.5},
        max_staleness=5,
        max_response_length=200,
    )
    assert any(scalars(batch.metrics)["rollout/staleness/mixed_responses"] > 0 for batch in batches)
    assert 0 < max(ages(batches)) <= 5
    for batch in batches:
        assert len(set(prompt_ids([batch])[0])) == 6


def test_stale_groups_are_dropped_counted_and_replaced():
    batches = trained(
        10,
        {"mean_length": 200},
        partial_rollout={"token_budget": 10, "over_sampling": 3.0},
        max_staleness=1,
        max_response_length=400,
        on_weight_update="abort_and_resume",
        on_stale="drop",
    )
    assert max(ages(batches)) <= 1
    assert scalars(batches[-1].metrics)["rollout/accounting/dropped_stale"] > 0
    assert all(len(batch.groups) == 6 for batch in batches)


def test_groups_are_reused_and_counted_once():
    batches = trained(8, max_reuse=2, max_staleness=1, mode="async")
    uses = names(batches)
    assert 1 < len(uses) / len(set(uses)) <= 2
    assert scalars(batches[-1].metrics)["rollout/accounting/trained"] == len(set(uses))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_uniform_groups_are_dropped_and_refilled(mode: str):
    def reward(prompt_id: str, position: int) -> float:
        return float(position) if int(prompt_id.split(":")[1]) % 3 else 1.0

    batches = trained(5, {"reward": reward}, mode=mode, filter_groups={"enable": True})
    assert all(len({t.reward for t in g.trajectories}) == 2 for batch in batches for g in batch.groups)
    metrics = scalars(batches[-1].metrics)
    assert metrics["rollout/accounting/dropped_uniform"] > 0
    if mode == "sync":  # in the order of the stream, those that are not uniform
        kept = [name for name in stream_order(40) if int(name.split(":")[1]) % 3]
        assert names(batches[:4]) == kept[:24]


@pytest.mark.parametrize("values", [{}, {"partial_rollout": {"token_budget": 10}}], ids=["whole", "pieces"])
def test_which_uniform_groups_are_dropped_depends_on_the_prompts_and_not_on_who_finished_first(values: dict[str, Any]):
    """Five of six prompts are uniform, so that the limit of one further batch is reached in every step."""

    def train(delay_s: Callable[[int], float]) -> list[list[Any]]:
        async def main() -> list[list[Any]]:
            filtered = settings(filter_groups={"enable": True, "max_num_gen_batches": 2}, **values)
            world = World(filtered, reward=lambda prompt_id, i: float(i * (int(prompt_id.split(":")[1]) % 6 == 0)))
            score = world.score

            async def delayed(group: Group) -> ScoredGroups:
                await asyncio.sleep(delay_s(int(group.prompt.prompt_id.split(":")[1])))
                return await score(group)

            world.score = delayed
            batches = await world.train(3)
            await world.scheduler.close()
            assert all(len({t.reward for t in batch.groups[-1].trajectories}) == 1 for batch in batches)
            assert scalars(batches[-1].metrics)["rollout/accounting/dropped_uniform"] == 3 * 6
            return contents(batches)

        return run_in_virtual_time(main())

    in_order = train(lambda number: 0.0)
    assert train(lambda number: 0.5 * number) == in_order
    assert train(lambda number: 0.5 * (40 - number)) == in_order


def test_groups_of_one_are_not_uniform():
    metrics = scalars(trained(2, {"reward": lambda *_: 1.0}, n=1, filter_groups={"enable": True})[-1].metrics)
    assert metrics["rollout/accounting/dropped_uniform"] == 0


def test_over_generation_is_bounded_if_every_group_is_uniform():
    world_values = {"reward": lambda prompt_id, position: 0.0, "num_prompts": 400}
    batches = trained(2, world_values, filter_groups={"enable": True, "max_num_gen_batches": 4})
    metrics = scalars(batches[-1].metrics)
    assert metrics["rollout/accounting/dropped_uniform"] == 2 * 3 * 6
    assert metrics["rollout/accounting/taken"] == 2 * 4 * 6


def test_a_slow_reward_delays_only_its_own_group():
    """One reward takes 50 s; the batches do not wait for its group."""

    async def main() -> list[tuple[str, float]]:
        world = World(settings(mode="async", max_staleness=5))
        slow, done = stream_order(1)[0], []

        async def score(group: Group) -> ScoredGroups:
            await asyncio.sleep(50.0 if group.prompt.prompt_id == slow else 0.0)
            done.append((group.prompt.prompt_id, asyncio.get_running_loop().time()))
            return ScoredGroups([group], 0)

        world.score = score
        batches = await world.train(3)
        assert asyncio.get_running_loop().time() < 20
        assert slow not in names(batches)
        await world.scheduler.close()
        return done

    run_in_virtual_time(main())


def test_a_prompt_that_every_engine_fails_at_is_quarantined_and_the_run_continues():
    async def main() -> None:
        world = World(settings(max_request_failures=4))
        bad = stream_order(3)[2]
        token = int(bad.split(":")[1]) + 1
        for engine in world.engines:
            engine.fails_on = {token}
        batches = await world.train(2)
        assert [reason.prompt_id for reason in world.quarantined] == [bad]
        assert names(batches) == [name for name in stream_order(13) if name != bad]
        metrics = scalars(batches[0].metrics)
        assert metrics["rollout/accounting/quarantined"] == 1
        assert metrics["rollout/request_failures"] == 4
        await world.scheduler.close()

    run_in_virtual_time(main())


def test_prompts_whose_reward_fails_are_quarantined_up_to_the_limit_of_a_batch():
    """Two of forty prompts fail and are quarantined; if all fail, the run ends with the function's error."""

    async def main(bad: set[str]) -> None:
        world = World(settings(max_reward_failures=2))
        score = world.score

        async def broken(group: Group) -> ScoredGroups:
            if group.prompt.prompt_id in bad:
                raise FunctionFailed("reward function f:g failed: ValueError")
            return await score(group)

        world.score = broken
        if len(bad) > 2:
            with pytest.raises(FunctionFailed, match=r"f:g failed: ValueError\n2 prompts .*max_reward_failures"):
                await world.scheduler.take()
        else:
            batches = await world.train(2)
            metrics = [scalars(batch.metrics) for batch in batches]
            assert [row["rollout/accounting/quarantined"] for row in metrics] == [2, 2]
            assert [row["rollout/reward_failures"] for row in metrics] == [2, 0]
            assert names(batches) == [name for name in stream_order(14) if name not in bad]
        assert len(world.quarantined) == 2
        assert {reason.prompt_id for reason in world.quarantined} <= bad
        await world.scheduler.close()

    run_in_virtual_time(main(set(stream_order(2))))
    run_in_virtual_time(main(set(stream_order(40))))


def test_an_engine_that_dies_loses_no_prompt():
    async def main() -> None:
        world = World(settings(mode="async", partial_rollout={"token_budget": 10}), num_engines=3)
        work = asyncio.ensure_future(world.train(6))
        for victim, at in ((0, 0.13), (2, 4.1)):
            await asyncio.sleep(at)
            world.engines[victim].die()
        batches = await work
        metrics = scalars(batches[-1].metrics)
        assert metrics["rollout/accounting/trained"] == 36
        assert metrics["rollout/accounting/quarantined"] == metrics["rollout/accounting/dropped_stale"] == 0
        assert len(set(names(batches))) == 36
        await world.scheduler.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize("values", [{}, {"mode": "async", "max_staleness": 2}], ids=["sync", "async"])
def test_a_resumed_run_loses_no_prompt_and_uses_the_same_seeds(values: dict[str, Any]):
    async def main() -> None:
        whole = World(settings(temperature=1.0, **values))
        await whole.train(6)
        world = World(settings(temperature=1.0, **values))
        batches = await world.train(3)
        await asyncio.sleep(0.2)
        saved = world.stream.state_dict(), world.scheduler.state_dict()
        await world.scheduler.close()

        again = World(settings(temperature=1.0, **values))
        again.stream.load_state_dict(saved[0])
        again.scheduler.load_state_dict(saved[1])
        batches += await again.train(3)
        trained = names(batches)
        assert len(trained) == len(set(trained)) == 36
        still_open = [prompt_id for _, prompt_id in again.scheduler.state_dict()["ledger"]["open"]]
        assert sorted(trained + still_open) == sorted(stream_order(again.stream.num_taken))
        seeds = [{r.request_id: r.seed for e in w.engines for _, r in e.log} for w in (world, again, whole)]
        assert (seeds[0] | seeds[1]).items() <= seeds[2].items()
        counts = scalars(batches[-1].metrics)
        assert counts["rollout/accounting/trained"] == 36
        assert counts["rollout/accounting/returned"] == 0
        await again.scheduler.close()
        await whole.scheduler.close()

    run_in_virtual_time(main())


def test_a_batch_that_times_out_names_the_engine_with_pending_requests():
    async def main() -> None:
        world = World(settings(request_timeout_s=30.0, max_request_failures=2, start_timeout_s=10.0))
        world.engines[1].hangs = True
        message = r"for 70 s \(.* has 3 of 6 new groups; still pending: engine 1 \(3 requ"
        with pytest.raises(RunError, match=message):
            await world.scheduler.take()
        await world.scheduler.close()

    run_in_virtual_time(main())


def test_a_batch_may_take_any_time_while_groups_are_finished():
    async def main() -> None:
        limits = settings(request_timeout_s=1.0, max_request_failures=1, start_timeout_s=1.0)
        world = World(limits, num_engines=1, groups_per_batch=20)
        first = world.score

        async def one_after_the_other(group: Group) -> ScoredGroups:
            async with turn:
                await asyncio.sleep(0.8 * limits.idle_limit_s)
                return await first(group)

        turn, world.score = asyncio.Lock(), one_after_the_other
        start_s = asyncio.get_running_loop().time()
        assert len((await world.scheduler.take()).groups) == 20
        assert asyncio.get_running_loop().time() - start_s > 15 * limits.idle_limit_s
        await world.scheduler.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize("groups_per_batch", [6, 100])
def test_requests_that_all_fail_end_the_run_with_the_first_cause(groups_per_batch: int):
    async def main() -> None:
        limits = settings(request_timeout_s=30.0, start_timeout_s=10.0)
        world = World(limits, groups_per_batch=groups_per_batch, num_prompts=1000)

        async def fails(request: GenerationRequest) -> Generated:
            await asyncio.sleep(1.0)
            raise RunError(f"vLLM refused {request.request_id}")

        for engine in world.engines:
            engine.generate = fails
        first = stream_order(1, num_prompts=1000)[0]
        with pytest.raises(RunError, match=rf"First, prompt {first} failed 3 times, .*: vLLM refused") as error:
            await world.scheduler.take()
        assert f"the requests of {len(world.quarantined) + 1} prompts failed" in str(error.value)
        assert 15 <= len(world.quarantined) < max(16, groups_per_batch)
        assert asyncio.get_running_loop().time() < 15
        await world.scheduler.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize("values", [{}, {"mode": "async", "max_staleness": 4}], ids=["sync", "async"])
def test_prompts_that_fail_at_once_while_others_are_generated_do_not_end_the_run(values: dict[str, Any]):
    """A third of the prompts fails before any other prompt is generated, more than 16 in a row."""

    async def main() -> None:
        world = World(settings(**values), groups_per_batch=60, num_prompts=1000)
        bad = {index for index in range(1000) if index % 3 == 0}
        for engine in world.engines:
            engine.fails_on = {index + 1 for index in bad}
        batches = await world.train(2)
        assert len(world.quarantined) > 32
        assert not {int(name.split(":")[1]) for name in names(batches)} & bad
        await world.scheduler.close()

    run_in_virtual_time(main())


def test_an_error_of_the_reward_is_raised_by_take():
    async def main() -> None:
        world = World(settings())

        async def broken(group: Group) -> ScoredGroups:
            raise RunError("the reward function is broken")

        world.score = broken
        with pytest.raises(RunError, match="the reward function is broken"):
            await world.scheduler.take()
        await world.scheduler.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize("broken", ["stream.take", "scheduler._uniform.drop_before"])
def test_an_error_of_a_call_that_nobody_awaits_is_raised_by_take(monkeypatch: pytest.MonkeyPatch, broken: str):
    """Groups whose rewards are all equal are dropped and replaced by others when they have been scored."""

    async def main() -> None:
        world = World(settings(filter_groups={"enable": True}), reward=lambda prompt_id, position: 0.0)
        taking = asyncio.create_task(world.scheduler.take())
        await asyncio.sleep(0)  # the first prompts have been started

        def fail(_: Any) -> NoReturn:
            raise AssertionError(f"{broken} is wrong")

        *path, name = broken.split(".")
        monkeypatch.setattr(reduce(getattr, path, world), name, fail)
        with pytest.raises(AssertionError, match=f"{broken} is wrong"):
            await asyncio.wait_for(taking, 10.0)
        await world.scheduler.close()

    run_in_virtual_time(main())


def test_failed_raises_the_error_that_ended_generation():
    async def main() -> None:
        world = World(settings())
        waiting = asyncio.create_task(world.scheduler.failed())
        await world.scheduler.take()
        assert not waiting.done()
        world.scheduler.fail(RunError("engine 0 did not come back"))
        with pytest.raises(RunError, match="engine 0 did not come back"):
            await waiting
        await world.scheduler.close()

    run_in_virtual_time(main())


def test_sft_prompts_come_from_the_same_stream_and_are_counted():
    async def main() -> None:
        world = World(settings())
        sft_prompts = world.scheduler.take_sft_prompts(5)
        batch = await world.scheduler.take()
        assert [p.prompt.prompt_id for p in sft_prompts] + prompt_ids([batch])[0] == stream_order(11)
        assert scalars(batch.metrics)["rollout/accounting/warm_start"] == 5
        await world.scheduler.close()

    run_in_virtual_time(main())


def test_a_batch_takes_as_long_as_its_longest_response():
    """Virtual time is the sum of token, scoring, update and load times."""

    async def main() -> None:
        world = World(settings(), mean_length=10**9)
        await world.train(2)
        expected = 2 * (50 * TOKEN_S + world.score_s + UPDATE_S + LOAD_S)
        assert asyncio.get_running_loop().time() == pytest.approx(expected, abs=0.01)
        await world.scheduler.close()

    run_in_virtual_time(main())


def by_number(prompt_id: str, position: int) -> float:
    """Reward by which a third of the prompts is always solved, a third never, and a third half of the time."""
    return float((1, 0, position % 2)[int(prompt_id.split(":")[1]) % 3])


@pytest.mark.parametrize("values", [{}, {"mode": "async", "max_staleness": 2}], ids=["sync", "async"])
def test_a_curriculum_prefers_prompts_that_are_solved_sometimes_and_the_accounting_stays_exact(values: dict[str, Any]):
    world_values = {"reward": by_number, "curriculum": {"min_probability": 0.05}}
    batches = trained(30, world_values, **values)
    early, late = names(batches[:5]), names(batches[-10:])
    assert {int(name.split(":")[1]) % 3 for name in early} == {0, 1, 2}
    assert sum(int(name.split(":")[1]) % 3 == 2 for name in late) > 0.7 * len(late)
    for batch in batches:
        counts = {n.rsplit("/")[-1]: v for n, v in scalars(batch.metrics).items() if "accounting" in n}
        assert counts.pop("taken") == sum(counts.values())
    assert counts["skipped"] > 0
    assert contents(trained(30, world_values, **values)) == contents(batches)


def test_a_curriculum_does_not_depend_on_reward_latency_and_resumes_where_it_stopped():
    values = {"reward": by_number, "curriculum": {"min_probability": 0.05}, "num_prompts": 9}

    def world(delay_s: Callable[[int], float]) -> World:
        delayed = World(settings(filter_groups={"enable": True}), **values)
        undelayed_score = delayed.score

        async def score(group: Group) -> ScoredGroups:
            await asyncio.sleep(delay_s(int(group.prompt.prompt_id.split(":")[1])))
            return await undelayed_score(group)

        delayed.score = score
        return delayed

    async def main(delay_s: Callable[[int], float], *, resume: bool = False) -> tuple[list[str], dict[str, Any]]:
        one = world(delay_s)
        batches = await one.train(6)
        if resume:
            saved = one.stream.state_dict(), one.scheduler.state_dict()
            await one.scheduler.close()
            one = world(delay_s)
            one.stream.load_state_dict(saved[0])
            one.scheduler.load_state_dict(saved[1])
        batches += await one.train(6)
        await one.scheduler.close()
        return names(batches), one.stream.state_dict()

    whole = run_in_virtual_time(main(lambda number: 0.5 * number))
    assert run_in_virtual_time(main(lambda number: 0.5 * number, resume=True)) == whole
    assert run_in_virtual_time(main(lambda number: 0.5 * (9 - number))) == whole


def test_an_environments_replies_are_part_of_the_batch_and_its_error_is_raised_by_take():
    class Tool:
        max_turns = 3

        async def reply(self, prompt: Prompt, turns: Sequence[dict[str, str]]) -> Reply | None:
            if prompt.prompt_id == self.broken:
                raise RunError("the tool is broken")
            return Reply({"role": "tool", "content": "200"}, np.array([200, 200], np.int32))

        broken = ""

    async def main() -> None:
        tool = Tool()
        world = World(settings(max_response_length=400), environment=tool)
        for batch in await world.train(2):
            for trajectory in (t for g in batch.groups for t in g.trajectories):
                assert (trajectory.response_token_ids == 200).sum() == 4
                assert sum(span.num_tokens for span in trajectory.version_spans) == trajectory.num_sampled
        tool.broken = stream_order(14)[13]
        with pytest.raises(RunError, match="the tool is broken"):
            await world.scheduler.take()
        await world.scheduler.close()

    run_in_virtual_time(main())
