"""Many faults on modelled engines in virtual time: the scheduling of tests/e2e/test_engine_faults.py."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, Trajectory
from megatron_bapo.rollout.generation import ScoredGroups, SetAside
from megatron_bapo.rollout.health import EngineHealth
from megatron_bapo.rollout.messages import EngineLost, GenerationEngine
from megatron_bapo.rollout.producer import Producer, Surroundings
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.virtual_time import run_in_virtual_time
from tests.unit.rollout.modelled_engines import END, ModelledEngine, decode, log_prob, next_token, prompts
from tests.unit.rollout.test_producer import settings

NUM_STEPS, NUM_PROMPTS, GROUPS_PER_BATCH = 100, 2000, 6
MEAN_LENGTH, MAX_LENGTH = 60, 200
START_S, UPDATE_S, FAULT_EVERY_S = 3.0, 0.7, 2.0


class SoakedEngine(ModelledEngine):
    """Hangs and dies also while it loads."""

    async def load_weights(self, version: int) -> None:
        assert self.num_in_flight == 0, "weights are not exchanged under requests in flight"
        for _ in range(5):
            await asyncio.sleep(0.1)
            if self.hangs:
                await asyncio.sleep(1.0)
            if self.dead or self.hangs:
                raise EngineLost(f"{self.name} was lost while it loaded")
        self.version = version


class Soak:
    """A producer, its engines' health, and somebody who harms them."""

    def __init__(self, seed: int, **values: object) -> None:
        self.lot = random.Random(seed)
        self.router = Router(on_lost=lambda name, reason: self.health.on_lost(name, reason))
        self.engines = {name: SoakedEngine(name, mean_length=MEAN_LENGTH) for name in ("engine 0", "engine 1")}
        tokenized = prompts(NUM_PROMPTS)
        self.stream = PromptStream([p.prompt for p in tokenized], seed=3, shuffle=True)
        self.set_aside: list[SetAside] = []
        given = Surroundings(
            self.stream,
            {p.prompt.prompt_id: p for p in tokenized},
            self.router,
            self.score,
            decode,
            self.set_aside.append,
        )
        self.settings = settings(
            mode="async", max_response_length=MAX_LENGTH, max_reward_failures=1000, max_request_failures=50, **values
        )
        self.producer = Producer(self.settings, GROUPS_PER_BATCH, 7, given)
        self.version = self.num_faults = self.num_raised = 0
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
        engine = self.engines[name] = SoakedEngine(name, mean_length=MEAN_LENGTH)
        await asyncio.sleep(START_S)
        if engine.dead or engine.hangs:
            raise RunError(f"{name} did not start")
        return engine, 10**9

    async def load_current_weights(self, engine: GenerationEngine) -> None:
        await engine.load_weights(self.version)

    async def score(self, group: Group) -> ScoredGroups:
        await asyncio.sleep(0.05)
        if self.lot.random() < 0.02:
            self.num_raised += 1
            raise FunctionFailed("planted")
        scored = tuple(replace(t, reward=float(i)) for i, t in enumerate(group.trajectories))
        return ScoredGroups([Group(group.prompt, scored)], 0)

    async def harm(self) -> None:
        while True:
            await asyncio.sleep(self.lot.expovariate(1 / FAULT_EVERY_S))
            engine = self.lot.choice([*self.engines.values()])
            self.num_faults += 1
            if self.lot.random() < 0.7:
                engine.die()
            else:
                engine.hangs = True

    async def train(self) -> list[ScoredGroups]:
        for name, engine in self.engines.items():
            self.router.add(name, engine, 10**9)
        self.health.start()
        harm = asyncio.ensure_future(self.harm())
        batches = []
        for _ in range(NUM_STEPS):
            batches.append(await self.producer.take())
            await asyncio.sleep(UPDATE_S)
            await self.producer.refresh(self.version + 1, self._load)
        harm.cancel()
        await self.health.close()
        await self.producer.close()
        return batches

    async def _load(self) -> None:
        async with self.health.weights:
            await self.router.on_every(lambda engine: engine.load_weights(self.version + 1))
            self.version += 1


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
    soak = Soak(5, on_refresh=on_refresh, max_staleness=2)
    batches = run_in_virtual_time(soak.train())

    assert soak.num_faults > 50
    trained: Counter[str] = Counter()
    for step, batch in enumerate(batches, start=1):
        metrics = scalars(batch.metrics)
        counts = {name.rsplit("/")[-1]: value for name, value in metrics.items() if "accounting" in name}
        assert counts.pop("drawn") == sum(counts.values())
        assert counts["trained"] == GROUPS_PER_BATCH * step
        assert metrics["rollout/staleness/max"] <= 2
        trained.update(group.prompt.prompt_id for group in batch.groups)
        for group in batch.groups:
            for trajectory in group.trajectories:
                assert_sampled_as_it_says(trajectory)
    assert set(trained.values()) == {1}
    assert len(soak.set_aside) == soak.num_raised
