"""A run in virtual time: the scheduler of real runs (`producer.py`), modelled engines, a trainer that only waits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megatron_bapo.config.rollout import PartialRolloutConfig, RolloutConfig
from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.metrics.values import scalars
from megatron_bapo.records import Group, Prompt
from megatron_bapo.rollout.generation import ScoredGroups
from megatron_bapo.rollout.messages import GenerationRequest
from megatron_bapo.rollout.modelled_engine import PROMPT_TOKEN, EngineModel, ModelledEngine, countdown
from megatron_bapo.rollout.producer import Producer, Surroundings
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.shared_cores import SharedCores
from megatron_bapo.rollout.tokenization import TokenizedPrompt
from megatron_bapo.rollout.virtual_time import run_in_virtual_time

STALENESS = (1, 2, 4, 8)
BUDGETS = (16, 8, 4)
"""Of them, the longest answer has so many."""
OVER_SAMPLING = 1.5
NEARLY = 0.98
"""Settings within this of the fastest are as good, and the least stale of them is named."""
FINEST = 2048
"""Tokens that the longest answer is simulated in; one of them stands for as many as that takes."""
FOR_EVER_S = 1e9
PROBE = GenerationRequest("probe", np.ones(1, np.int32), 1, 1.0, 1.0, -1, 0.0, 1, 0)
"""One token of an answer that ends with it."""


@dataclass(frozen=True)
class Workload:
    """What does not depend on the scheduler's settings."""

    engine: EngineModel
    num_engines: int
    groups_per_batch: int
    prompt_tokens: int
    lengths: np.ndarray
    """Answers' lengths in tokens, each as likely as any other."""
    train_s: float
    """Of all updates on one rollout batch of as many tokens as batches have on average, and of no stale ones."""
    stale_train_share: float = 0.0
    """By which a batch of stale tokens takes longer."""
    score_s: float = 0.0
    """Between a group's last token and its rewards."""
    num_cores: float = math.inf
    """Of the machine that engines and trainer share; infinitely many where they have machines of their own."""
    trainer_cores: float = 0.0
    """Of them, those that updates keep busy."""

    def coarse(self, grain: int) -> Workload:
        """The same, where one token stands for `grain`."""
        engine = replace(
            self.engine,
            decode=self.engine.decode.coarse(grain),
            prefill_s=self.engine.prefill_s * grain,
            kv_tokens=self.engine.kv_tokens // grain,
        )
        lengths = np.maximum(1, np.rint(self.lengths / grain)).astype(np.int32)
        return replace(self, engine=engine, prompt_tokens=max(1, self.prompt_tokens // grain), lengths=lengths)


@dataclass(frozen=True)
class Simulated:
    """Over the steps after the first ones."""

    seconds: float
    num_steps: int
    steps_per_hour: float
    tokens_per_s: float
    """Of answers that were trained on."""
    engine_idle: float
    """Part of the engines' time with no request."""
    num_running: float
    """Mean number of sequences on an engine."""
    most_running: int
    trainer_idle: float
    staleness_mean: float
    """Policy versions, over tokens."""
    staleness_max: float
    dropped_stale: float
    """Groups that became too old, over groups trained on."""

    def as_data(self) -> dict[str, float]:
        return asdict(self)


def candidates(settings: RolloutConfig) -> dict[str, RolloutConfig]:
    """The settings to choose from, by name: no other key of the section differs."""
    synchronous: dict[str, Any] = {
        "mode": "sync",
        "max_staleness": 1,
        "max_reuse": 1,
        "on_refresh": "drain",
        "partial_rollout": PartialRolloutConfig(),
    }
    budgets = [budget for part in BUDGETS if (budget := settings.max_response_length // part) > 0]
    found = {"sync": synchronous}
    for staleness in STALENESS:
        asynchronous = synchronous | {"mode": "async", "max_staleness": staleness}
        found[f"async {staleness}"] = asynchronous | {"on_refresh": "abort_and_resume"}
    for budget in budgets:
        pieces = PartialRolloutConfig(token_budget=budget)
        over = PartialRolloutConfig(token_budget=budget, over_sampling=OVER_SAMPLING)
        found[f"sync, budget {budget}"] = synchronous | {"partial_rollout": over, "max_staleness": 4}
        found[f"async 4, budget {budget}"] = synchronous | {
            "mode": "async",
            "max_staleness": 4,
            "partial_rollout": pieces,
        }
    return {name: settings.model_copy(update=values) for name, values in found.items()}


def best(results: Mapping[str, Simulated]) -> str:
    """The least stale of the fastest."""
    limit = NEARLY * max(result.steps_per_hour for result in results.values())
    fast = [name for name, result in results.items() if result.steps_per_hour >= limit]
    return min(fast, key=lambda name: (results[name].staleness_max, results[name].staleness_mean))


def simulate(
    settings: RolloutConfig, workload: Workload, *, num_steps: int, num_first_steps: int = 1, seed: int = 0
) -> Simulated:
    """`num_steps` rollout batches after the first `num_first_steps`, which only fill the pipeline."""
    grain = max(1, settings.max_response_length // FINEST)
    run = _Run(_coarse(settings, grain), workload.coarse(grain), seed)
    result = run_in_virtual_time(run.train(num_steps, num_first_steps))
    return replace(result, tokens_per_s=result.tokens_per_s * grain)


def _coarse(settings: RolloutConfig, grain: int) -> RolloutConfig:
    partial = settings.partial_rollout
    if partial.token_budget is not None:
        partial = partial.model_copy(update={"token_budget": max(1, partial.token_budget // grain)})
    length = settings.max_response_length // grain
    no_limit = {"request_timeout_s": FOR_EVER_S, "health_check_timeout_s": FOR_EVER_S}
    return settings.model_copy(update={"max_response_length": length, "partial_rollout": partial} | no_limit)


@dataclass(frozen=True)
class _Step:
    """What is known at a step's end; sums are over engines since the run's start."""

    end_s: float
    busy_s: float
    sequence_s: float
    most_running: int
    num_groups: int
    num_tokens: int
    train_s: float
    staleness_mean: float
    staleness_max: float
    dropped_stale: float


def _step(now_s: float, train_s: float, scored: ScoredGroups, engines: list[ModelledEngine]) -> _Step:
    metrics = scalars(scored.metrics)
    return _Step(
        end_s=now_s,
        train_s=train_s,
        busy_s=sum(engine.busy_s for engine in engines),
        sequence_s=sum(engine.sequence_s for engine in engines),
        most_running=max(engine.most_running for engine in engines),
        num_groups=len(scored.groups),
        num_tokens=sum(len(t.response_token_ids) for group in scored.groups for t in group.trajectories),
        staleness_mean=metrics["rollout/staleness/mean"],
        staleness_max=metrics["rollout/staleness/max"],
        dropped_stale=metrics["rollout/accounting/dropped_stale"],
    )


def _simulated(first: Sequence[_Step], steps: Sequence[_Step], work: Workload) -> Simulated:
    before, last = first[-1], steps[-1]
    seconds = last.end_s - before.end_s
    num_tokens = sum(step.num_tokens for step in steps)
    return Simulated(
        seconds=seconds,
        num_steps=len(steps),
        steps_per_hour=len(steps) * 3600 / seconds,
        tokens_per_s=num_tokens / seconds,
        engine_idle=1 - (last.busy_s - before.busy_s) / (seconds * work.num_engines),
        num_running=(last.sequence_s - before.sequence_s) / (seconds * work.num_engines),
        most_running=last.most_running,
        trainer_idle=1 - sum(step.train_s for step in steps) / seconds,
        staleness_mean=sum(step.staleness_mean * step.num_tokens for step in steps) / num_tokens,
        staleness_max=max(step.staleness_max for step in steps),
        dropped_stale=(last.dropped_stale - before.dropped_stale) / sum(step.num_groups for step in steps),
    )


class _Run:
    """Everything of one simulated run."""

    def __init__(self, settings: RolloutConfig, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._settings = settings
        self._version = 0

    async def train(self, num_steps: int, num_first_steps: int) -> Simulated:
        loop, work = asyncio.get_running_loop(), self._workload
        cores = SharedCores(work.num_cores)
        policy = countdown(work.lengths)
        engines = [ModelledEngine(f"engine {i}", work.engine, policy, cores) for i in range(work.num_engines)]
        producer = self._producer(engines)
        steps: list[_Step] = []
        for _ in range(num_first_steps + num_steps):
            scored = await producer.take()
            start = loop.time()
            with cores.busy(work.trainer_cores) as own:
                await own.work(self._train_s(scored))
            train_s = loop.time() - start
            await self._refresh(producer, engines)
            steps.append(_step(loop.time(), train_s, scored, engines))
        await producer.close()
        return _simulated(steps[:num_first_steps], steps[num_first_steps:], work)

    def _train_s(self, scored: ScoredGroups) -> float:
        """On cores of its own."""
        work, is_stale = self._workload, scalars(scored.metrics)["rollout/staleness/max"] > 0
        answers = [trajectory for group in scored.groups for trajectory in group.trajectories]
        num_tokens = sum(len(answer.prompt_token_ids) + len(answer.response_token_ids) for answer in answers)
        usual = work.groups_per_batch * self._settings.n * (work.prompt_tokens + float(work.lengths.mean()))
        return work.train_s * num_tokens / usual * (1 + work.stale_train_share * is_stale)

    def _producer(self, engines: list[ModelledEngine]) -> Producer:
        work, router = self._workload, Router()
        for engine in engines:
            router.add(engine.name, engine, work.engine.kv_tokens)
        token_ids = np.full(work.prompt_tokens, PROMPT_TOKEN, np.int32)
        prompts = [
            TokenizedPrompt(Prompt(f"simulated:{i}", (), "", "simulated"), token_ids)
            for i in range(work.groups_per_batch)
        ]
        stream = PromptStream([prompt.prompt for prompt in prompts], seed=self._seed, shuffle=False)
        given = Surroundings(
            stream, {prompt.prompt.prompt_id: prompt for prompt in prompts}, router, self._scored, _decode, _no_failure
        )
        return Producer(self._settings, work.groups_per_batch, self._seed, given)

    async def _scored(self, group: Group) -> ScoredGroups:
        """With rewards that differ."""
        await asyncio.sleep(self._workload.score_s)
        trajectories = tuple(replace(t, reward=float(i)) for i, t in enumerate(group.trajectories))
        return ScoredGroups([Group(group.prompt, trajectories)], 0)

    async def _refresh(self, producer: Producer, engines: list[ModelledEngine]) -> None:
        self._version += 1

        async def load() -> None:
            await asyncio.gather(*(engine.load_weights(self._version) for engine in engines))

        await producer.refresh(self._version, load)
        # New weights are probed before the trainer goes on, behind what the engines take in again.
        await asyncio.gather(*(engine.generate(PROBE) for engine in engines))


def _decode(token_ids: np.ndarray) -> str:
    return f"{len(token_ids)} tokens"


def _no_failure(reason: Exception) -> None:
    raise AssertionError("a modelled engine fails at nothing") from reason
