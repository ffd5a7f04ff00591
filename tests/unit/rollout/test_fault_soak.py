"""Many faults on modelled engines in virtual time: the scheduling of tests/e2e/test_engine_faults.py."""

import asyncio
import random
from collections import Counter

import numpy as np
import pytest

from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.health import EngineHealth
from megatron_bapo.rollout.messages import GenerationEngine
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.virtual_time import run_in_virtual_time
from tests.unit.rollout.modelled_engines import END, FaultyEngine, decode, log_prob, next_token
from tests.unit.rollout.world import World, settings

NUM_STEPS, NUM_PROMPTS = 100, 2000
MEAN_LENGTH, MAX_LENGTH = 60, 200
START_S, UPDATE_S, FAULT_EVERY_S = 3.0, 0.7, 2.0


class Soak(World):
    """Somebody harms the engines, and their health is watched."""

    def __init__(self, seed: int, **values: object) -> None:
        limits = {"max_response_length": MAX_LENGTH, "max_reward_failures": 1000, "max_request_failures": 50}
        super().__init__(
            settings(mode="async", **limits, **values),
            num_prompts=NUM_PROMPTS,
            mean_length=MEAN_LENGTH,
            update_s=UPDATE_S,
            router=Router(on_lost=lambda name, reason: self.health.on_lost(name, reason)),
        )
        self.lot = random.Random(seed)
        self.alive = {engine.name: engine for engine in self.engines}
        self.num_faults = self.num_raised = 0
        self.health = EngineHealth(
            self.router,
            self,
            lambda *event: None,
            self.producer.fail,
            interval_s=0.3,
            timeout_s=0.5,
            max_restarts=20,
        )

    async def restart(self, name: str) -> tuple[GenerationEngine, int]:
        engine = self.alive[name] = FaultyEngine(name, mean_length=MEAN_LENGTH)
        await asyncio.sleep(START_S)
        if engine.dead or engine.hangs:
            raise RunError(f"{name} did not start")
        return engine, 10**9

    async def load_current_weights(self, engine: GenerationEngine) -> None:
        await engine.load_weights(self.version)

    async def score(self, group: Group) -> ScoredGroups:
        scored = await super().score(group)
        if self.lot.random() < 0.02:
            self.num_raised += 1
            raise FunctionFailed("planted")
        return scored

    async def harm(self) -> None:
        while True:
            await asyncio.sleep(self.lot.expovariate(1 / FAULT_EVERY_S))
            engine = self.lot.choice([*self.alive.values()])
            self.num_faults += 1
            if self.lot.random() < 0.7:
                engine.die()
            else:
                engine.hangs = True

    async def load_weights(self) -> None:
        async with self.health.weights:
            await self.router.on_every(lambda engine: engine.load_weights(self.version + 1))
            self.version += 1

    async def train(self, num_steps: int) -> list[ScoredGroups]:
        self.health.start()
        harm = asyncio.ensure_future(self.harm())
        batches = await super().train(num_steps)
        harm.cancel()
        await self.health.close()
        await self.producer.close()
        return batches


def assert_sampled_as_it_says(trajectory: Trajectory) -> None:
    """Each token is the one of the policy that its version names, after those before it."""
    context, said = trajectory.prompt_token_ids.tolist(), iter(trajectory.behaviour_log_probs)
    versions = [span.policy_version for span in trajectory.version_spans for _ in range(span.num_tokens)]
    for version, token in zip(versions, trajectory.response_token_ids.tolist(), strict=True):
        assert token == next_token(version, context, greedy=True, seed=0, mean_length=MEAN_LENGTH)
        assert next(said) == np.float32(log_prob(version, context, token))
        context.append(token)
    assert (context[-1] == END) == (trajectory.finish_reason == "stop")
    assert trajectory.text == decode(trajectory.response_token_ids)


@pytest.mark.parametrize("on_refresh", ["drain", "abort_and_resume", "keep"])
def test_many_faults_lose_no_prompt_and_falsify_no_token(on_refresh: str):
    async def main() -> tuple[Soak, list[ScoredGroups]]:
        soak = Soak(5, on_refresh=on_refresh, max_staleness=2)
        return soak, await soak.train(NUM_STEPS)

    soak, batches = run_in_virtual_time(main())
    assert soak.num_faults > 50
    trained: Counter[str] = Counter()
    for step, batch in enumerate(batches, start=1):
        metrics = scalars(batch.metrics)
        counts = {name.rsplit("/")[-1]: value for name, value in metrics.items() if "accounting" in name}
        assert counts.pop("drawn") == sum(counts.values())
        assert counts["trained"] == soak.groups_per_batch * step
        assert metrics["rollout/staleness/max"] <= 2
        trained.update(group.prompt.prompt_id for group in batch.groups)
        for group in batch.groups:
            for trajectory in group.trajectories:
                assert_sampled_as_it_says(trajectory)
    assert set(trained.values()) == {1}
    assert len(soak.set_aside) == soak.num_raised
