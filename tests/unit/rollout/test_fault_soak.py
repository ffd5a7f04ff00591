"""Randomized faults of modelled engines in virtual time; tests/e2e/test_engine_faults.py has real engines."""

import asyncio
import random
from collections import Counter
from typing import Self

import numpy as np
import pytest

from megatron_bapo.cluster.engine_fleet import EngineFleet
from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.router import Router
from megatron_bapo.simulation.virtual_time import run_in_virtual_time
from tests.unit.rollout.world import World, settings
from tests.unit.simulation.modelled_engines import END, FaultyEngine, log_prob, next_token, text_of

NUM_STEPS, NUM_PROMPTS = 100, 2000
MEAN_LENGTH, MAX_LENGTH = 60, 200
START_S, UPDATE_S, FAULT_EVERY_S = 3.0, 0.7, 2.0


class ReplaceableEngine(FaultyEngine):
    """A modelled engine that can be restarted, and that may fail while it starts."""

    def __init__(self, soak: "Soak", name: str, start_s: float = 0.0) -> None:
        super().__init__(name, mean_length=MEAN_LENGTH)
        self.soak, self.start_s = soak, start_s

    def replacement(self) -> Self:
        self.soak.alive[self.name] = type(self)(self.soak, self.name, START_S)
        return self.soak.alive[self.name]

    async def started(self) -> int:
        await asyncio.sleep(self.start_s)
        if self.dead or self.hangs:
            raise RunError(f"{self.name} did not start")
        return 10**9


class Soak(World):
    """A scheduler whose engines are killed and stopped at random, and replaced by the fleet."""

    def __init__(self, seed: int, **values: object) -> None:
        limits = {"max_response_length": MAX_LENGTH, "max_reward_failures": 1000, "max_request_failures": 50}
        probes = {"health_check_interval_s": 0.3, "health_check_timeout_s": 0.5, "max_engine_restarts": 20}
        super().__init__(
            settings(mode="async", **limits, **probes, **values),
            num_engines=0,  # the fleet adds them
            num_prompts=NUM_PROMPTS,
            mean_length=MEAN_LENGTH,
            update_s=UPDATE_S,
            router=Router(on_lost=lambda name, reason: self.fleet.on_lost(name, reason)),
        )
        self.random = random.Random(seed)
        self.alive = {name: ReplaceableEngine(self, name) for name in ("engine 0", "engine 1")}
        self.num_faults = self.num_raised = 0
        self.fleet = EngineFleet(self.alive, self.router, self.settings, lambda *event: None, self.scheduler.fail)

    async def score(self, group: Group) -> ScoredGroups:
        scored = await super().score(group)
        if self.random.random() < 0.02:
            self.num_raised += 1
            raise FunctionFailed("planted")
        return scored

    async def inject_faults(self) -> None:
        while True:
            await asyncio.sleep(self.random.expovariate(1 / FAULT_EVERY_S))
            engine = self.random.choice([*self.alive.values()])
            self.num_faults += 1
            if self.random.random() < 0.7:
                engine.die()
            else:
                engine.hangs = True

    async def load_weights(self) -> None:
        await self.fleet.load_weights(self.version + 1)
        self.version += 1

    async def train(self, num_steps: int) -> list[ScoredGroups]:
        await self.fleet.start()
        faults = asyncio.ensure_future(self.inject_faults())
        batches = await super().train(num_steps)
        faults.cancel()
        await self.fleet.close()
        await self.scheduler.close()
        return batches


def assert_sampled_by_recorded_versions(trajectory: Trajectory) -> None:
    """Each token and log-prob is that of the recorded policy version, given the tokens before it."""
    context, recorded = trajectory.prompt_token_ids.tolist(), iter(trajectory.behaviour_log_probs)
    versions = [span.policy_version for span in trajectory.version_spans for _ in range(span.num_tokens)]
    for version, token in zip(versions, trajectory.response_token_ids.tolist(), strict=True):
        assert token == next_token(version, context, greedy=True, seed=0, mean_length=MEAN_LENGTH)
        assert next(recorded) == np.float32(log_prob(version, context, token))
        context.append(token)
    assert (context[-1] == END) == (trajectory.finish_reason == "stop")
    assert trajectory.text == text_of(trajectory.response_token_ids)


@pytest.mark.parametrize("on_weight_update", ["drain", "abort_and_resume", "keep"])
def test_random_faults_lose_no_prompt_and_corrupt_no_token(on_weight_update: str):
    async def main() -> tuple[Soak, list[ScoredGroups]]:
        soak = Soak(5, on_weight_update=on_weight_update, max_staleness=2)
        return soak, await soak.train(NUM_STEPS)

    soak, batches = run_in_virtual_time(main())
    assert soak.num_faults > 50
    trained: Counter[str] = Counter()
    for step, batch in enumerate(batches, start=1):
        metrics = scalars(batch.metrics)
        counts = {name.rsplit("/")[-1]: value for name, value in metrics.items() if "accounting" in name}
        assert counts.pop("taken") == sum(counts.values())
        assert counts["trained"] == soak.groups_per_batch * step
        assert metrics["rollout/staleness/max"] <= 2
        trained.update(group.prompt.prompt_id for group in batch.groups)
        for group in batch.groups:
            for trajectory in group.trajectories:
                assert_sampled_by_recorded_versions(trajectory)
    assert set(trained.values()) == {1}
    assert len(soak.quarantined) == soak.num_raised
