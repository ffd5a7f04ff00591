"""With on_stale=wait every prompt that is started is trained on in time; with drop, long responses are lost."""

import asyncio
import json
import random
from collections import Counter
from typing import Any

import pytest

from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.rollout.world import World, settings

NUM_STEPS, GROUPS_PER_BATCH = 14, 6


def random_settings(generator: random.Random) -> dict[str, Any]:
    """Return random scheduling keys that the configuration accepts."""
    max_staleness = generator.choice([0, 1, 1, 2, 3])
    values: dict[str, Any] = {
        "mode": generator.choice(["sync", "async", "async"]),
        "max_staleness": max_staleness,
        "max_reuse": generator.randint(1, min(3, max_staleness + 1)),
        "on_weight_update": generator.choice(["drain", "abort_and_resume", "keep"]),
        "partial_rollout": {"token_budget": generator.choice([None, 7, 25])},
        "filter_groups": {"enable": generator.random() < 0.5, "max_num_gen_batches": 2},
    }
    if values["mode"] == "sync" and max_staleness:
        values["partial_rollout"]["over_sampling"] = generator.choice([1.0, 1.5, 4.0])
    return values


class RandomWorld(World):
    """A world with random delays: of rewards, of updates, and of engines that die."""

    def __init__(self, generator: random.Random, values: dict[str, Any]) -> None:
        self.random = generator
        super().__init__(
            settings(max_response_length=150, temperature=1.0, max_request_failures=10, **values),
            mean_length=40,
            num_engines=3,
            num_prompts=600,
            groups_per_batch=GROUPS_PER_BATCH,
            reward=lambda prompt_id, position: float(position * (int(prompt_id.split(":")[1]) % 3 > 0)),
        )

    async def score(self, group: Group) -> ScoredGroups:
        await asyncio.sleep(self.random.choice([0.0, 0.0, 0.3, 2.0]))
        return await super().score(group)

    async def step(self) -> ScoredGroups:
        self.update_s = self.random.choice([0.0, 0.1, 1.0])
        return await super().step()

    async def resumed(self, values: dict[str, Any]) -> "RandomWorld":
        """Return a world that continues from the checkpoint of this one."""
        state, in_flight = json.dumps(self.scheduler.state_dict()), self.scheduler.in_flight_state()
        again = RandomWorld(self.random, values)
        again.stream.load_state_dict(self.stream.state_dict())
        await self.scheduler.close()
        again.scheduler.load_state_dict(json.loads(state), in_flight)
        again.version = self.version - 1
        await again.update_weights()
        return again


@pytest.mark.parametrize("seed", range(24))
def test_every_started_prompt_is_trained_on_in_time(seed: int):
    generator = random.Random(seed)
    values = random_settings(generator)

    async def main() -> list[ScoredGroups]:
        world, batches = RandomWorld(generator, values), []
        for step in range(NUM_STEPS):
            batches.append(await world.step())
            if step == 4:
                world.engines[2].die()
            if step == 8:
                world = await world.resumed(values)
        await world.scheduler.close()
        return batches

    batches = run_in_virtual_time(main())
    uses = Counter(group.prompt.prompt_id for batch in batches for group in batch.groups)
    assert max(uses.values()) <= values["max_reuse"]
    for batch in batches:
        metrics = scalars(batch.metrics)
        assert metrics["rollout/accounting/dropped_stale"] == 0
        assert metrics["rollout/staleness/max"] <= values["max_staleness"]
        assert len(batch.groups) == GROUPS_PER_BATCH
    assert metrics["rollout/accounting/trained"] == len(uses)


def test_more_unfinished_groups_than_fit_are_dropped_without_a_deadlock():
    """A run with max_staleness=4 is resumed with max_staleness=1."""
    values = {"mode": "async", "on_weight_update": "abort_and_resume"}

    async def main() -> tuple[ScoredGroups, ...]:
        world = RandomWorld(random.Random(3), {**values, "max_staleness": 4})
        await world.train(4)
        again = await world.resumed({**values, "max_staleness": 1})
        batches = tuple(await again.train(6))
        await again.scheduler.close()
        return batches

    dropped = [scalars(batch.metrics)["rollout/accounting/dropped_stale"] for batch in run_in_virtual_time(main())]
    assert dropped[-1] == dropped[2] > 0  # nothing that was started after the resume


def test_with_drop_the_dropped_responses_are_counted_with_their_lengths():
    async def main() -> list[ScoredGroups]:
        values = {"mode": "async", "on_weight_update": "abort_and_resume", "on_stale": "drop"}
        world = World(settings(max_response_length=400, **values), mean_length=100, update_s=0.0, num_prompts=600)
        batches = await world.train(20)
        await world.scheduler.close()
        return batches

    batches = run_in_virtual_time(main())
    lengths = [length for batch in batches for group in batch.groups for length in group.lengths]
    dropped = [batch.metrics.get("rollout/dropped_stale/response_length_mean") for batch in batches]
    total = sum(metric.total for metric in dropped if metric is not None)
    num = sum(metric.weight for metric in dropped if metric is not None)
    assert num >= 2 * scalars(batches[-1].metrics)["rollout/accounting/dropped_stale"] > 0
    assert total / num > 1.2 * sum(lengths) / len(lengths)


def test_a_timeout_says_that_the_batch_waits_for_older_groups():
    """The group of the first prompt is never scored; the batch of version 1 must have it."""

    async def main() -> None:
        world = World(settings(mode="async", request_timeout_s=50.0, start_timeout_s=1.0), groups_per_batch=2)
        score, seen = world.score, list[str]()

        async def never_the_first(group: Group) -> ScoredGroups:
            seen.append(group.prompt.prompt_id)
            await asyncio.sleep(1e6 if seen.index(group.prompt.prompt_id) == 0 else 0.0)
            return await score(group)

        world.score = never_the_first
        with pytest.raises(
            RunError, match=r"has \d of 2 new groups, but older ones are unfinished \(rollout.on_stale="
        ):
            await world.train(3)
        await world.scheduler.close()

    run_in_virtual_time(main())


def test_a_group_that_is_dropped_while_its_failed_reward_ends_is_not_quarantined_as_well():
    """One of the first group's rewards fails, and another takes long to end when it is cancelled for that."""

    async def main() -> None:
        world = World(settings(mode="async", on_stale="drop"), groups_per_batch=1)
        score, failed = world.score, asyncio.Event()

        async def fail() -> None:
            failed.set()
            raise FunctionFailed("a reward failed")

        async def end_slowly() -> None:
            try:
                await asyncio.sleep(1e6)
            finally:
                await asyncio.sleep(100.0)

        async def fails_once(group: Group) -> ScoredGroups:
            if failed.is_set():
                return await score(group)
            try:
                async with asyncio.TaskGroup() as rewards:
                    rewards.create_task(end_slowly())
                    rewards.create_task(fail())
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            raise AssertionError

        world.score = fails_once
        await world.update_weights()
        await failed.wait()
        for _ in range(3):
            await world.update_weights()
        await asyncio.sleep(200.0)
        counts = scalars((await world.step()).metrics)
        assert (counts["rollout/accounting/quarantined"], world.quarantined) == (0, [])
        assert counts["rollout/accounting/dropped_stale"] >= 1
        await world.scheduler.close()

    run_in_virtual_time(main())
