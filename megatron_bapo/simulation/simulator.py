"""Simulate a run in virtual time: the scheduler of real runs with simulated engines and a trainer that only waits."""

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
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.scheduler import RolloutScheduler
from megatron_bapo.rollout.scheduler_deps import SchedulerDeps
from megatron_bapo.rollout.tokenization import TokenizedPrompt
from megatron_bapo.simulation.cpu_contention import SharedCores
from megatron_bapo.simulation.modelled_engine import PROMPT_TOKEN, EngineModel, ModelledEngine, countdown
from megatron_bapo.simulation.virtual_time import run_in_virtual_time

STALENESS = (1, 2, 4, 8)
NUM_PIECES = (16, 8, 4)
"""Token budgets to try, as the number of pieces that the longest response is split into."""
OVER_SAMPLING = 1.5
NEARLY_FASTEST = 0.98
"""Settings that reach this share of the highest speed count as equally fast; the least stale of them is the best."""
MAX_SIMULATED_LENGTH = 2048
"""Most simulated tokens per response; longer limits are scaled down, so that one simulated token stands for several."""
NO_TIMEOUT_S = 1e6
"""Twelve days, which no request takes: after them a simulation that cannot go on ends with an error."""
PROBE = GenerationRequest("probe", (np.ones(1, np.int32),), 1, 1.0, 1.0, -1, 0.0, 1, 0)
"""Request for the last token of a response, as the log-prob probe after a weight update."""


@dataclass(frozen=True)
class Workload:
    """Everything that does not depend on the scheduler's settings."""

    engine: EngineModel
    num_engines: int
    groups_per_batch: int
    prompt_tokens: int
    lengths: np.ndarray
    """Equally likely response lengths in tokens."""
    train_s: float
    """Seconds of all updates on one rollout batch of average size without stale tokens."""
    stale_train_share: float = 0.0
    """Relative increase of the training time for a batch with stale tokens."""
    score_s: float = 0.0
    """Seconds between a group's last token and its rewards."""
    num_cores: float = math.inf
    """Cores that engines and trainer share; infinite where they run on separate machines."""
    trainer_cores: float = 0.0
    """Cores that updates keep busy."""

    def coarse(self, grain: int) -> Workload:
        """Return the workload where one simulated token stands for `grain` tokens."""
        engine = replace(
            self.engine,
            decode=self.engine.decode.coarse(grain),
            prefill_s=self.engine.prefill_s * grain,
            kv_tokens=self.engine.kv_tokens // grain,
            state_tokens=self.engine.state_tokens / grain,
        )
        lengths = np.maximum(1, np.rint(self.lengths / grain)).astype(np.int32)
        return replace(self, engine=engine, prompt_tokens=max(1, self.prompt_tokens // grain), lengths=lengths)


@dataclass(frozen=True)
class Simulated:
    """Result of a simulation, over the steps after the first ones."""

    seconds: float
    num_steps: int
    steps_per_hour: float
    tokens_per_s: float
    """Response tokens per second that were trained on."""
    engine_idle: float
    """Fraction of the engines' time without requests."""
    num_running: float
    """Mean number of running sequences on an engine."""
    most_running: int
    trainer_idle: float
    staleness_mean: float
    """Mean over tokens, in policy versions."""
    staleness_max: float
    dropped_stale: float
    """Ratio of the groups dropped as too stale to the groups trained on."""
    response_length: float
    """Mean length of the responses trained on, in tokens."""

    def as_data(self) -> dict[str, float]:
        return asdict(self)


def candidates(settings: RolloutConfig) -> dict[str, RolloutConfig]:
    """Return the settings to choose from, by name. Only scheduling keys differ from `settings`."""
    synchronous: dict[str, Any] = {
        "mode": "sync",
        "max_staleness": 1,
        "max_reuse": 1,
        "on_weight_update": "drain",
        "partial_rollout": PartialRolloutConfig(),
    }
    budgets = [budget for num in NUM_PIECES if (budget := settings.max_response_length // num) > 0]
    found = {"sync": synchronous}
    for staleness in STALENESS:
        asynchronous = synchronous | {"mode": "async", "max_staleness": staleness}
        found[f"async {staleness}"] = asynchronous | {"on_weight_update": "abort_and_resume"}
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
    """Return the name of the least stale settings among the fastest."""
    limit = NEARLY_FASTEST * max(result.steps_per_hour for result in results.values())
    fast = [name for name, result in results.items() if result.steps_per_hour >= limit]
    return min(fast, key=lambda name: (results[name].staleness_max, results[name].staleness_mean))


def simulate(
    settings: RolloutConfig, workload: Workload, *, num_steps: int, num_first_steps: int = 1, seed: int = 0
) -> Simulated:
    """Simulate `num_steps` rollout batches after `num_first_steps` that only fill the pipeline."""
    grain = max(1, settings.max_response_length // MAX_SIMULATED_LENGTH)
    run = _Run(_coarse(settings, grain), workload.coarse(grain), seed)
    result = run_in_virtual_time(run.train(num_steps, num_first_steps))
    return replace(result, tokens_per_s=result.tokens_per_s * grain, response_length=result.response_length * grain)


def _coarse(settings: RolloutConfig, grain: int) -> RolloutConfig:
    partial = settings.partial_rollout
    if partial.token_budget is not None:
        partial = partial.model_copy(update={"token_budget": max(1, partial.token_budget // grain)})
    length = settings.max_response_length // grain
    no_limit = {"request_timeout_s": NO_TIMEOUT_S, "health_check_timeout_s": NO_TIMEOUT_S}
    return settings.model_copy(update={"max_response_length": length, "partial_rollout": partial} | no_limit)


@dataclass(frozen=True)
class _Step:
    """State at the end of a step; `busy_s` and `sequence_s` are sums over engines since the start of the run."""

    end_s: float
    busy_s: float
    sequence_s: float
    most_running: int
    num_groups: int
    num_responses: int
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
        num_responses=sum(len(group.trajectories) for group in scored.groups),
        num_tokens=sum(sum(group.lengths) for group in scored.groups),
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
        response_length=num_tokens / sum(step.num_responses for step in steps),
    )


class _Run:
    """One simulated run."""

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
        router = Router()
        for engine in engines:
            router.add(engine.name, engine, work.engine.kv_tokens)
        scheduler = self._scheduler(router)
        reporting = loop.create_task(self._report_progress(router, scheduler))
        steps: list[_Step] = []
        for _ in range(num_first_steps + num_steps):
            scored = await scheduler.take()
            start = loop.time()
            with cores.busy(work.trainer_cores) as own:
                await own.work(self._train_s(scored))
            train_s = loop.time() - start
            await self._update_weights(scheduler, engines)
            steps.append(_step(loop.time(), train_s, scored, engines))
        reporting.cancel()
        await scheduler.close()
        return _simulated(steps[:num_first_steps], steps[num_first_steps:], work)

    def _train_s(self, scored: ScoredGroups) -> float:
        """Return the training seconds of a batch without CPU contention."""
        work, is_stale = self._workload, scalars(scored.metrics)["rollout/staleness/max"] > 0
        trajectories = [trajectory for group in scored.groups for trajectory in group.trajectories]
        num_tokens = sum(len(each.prompt_token_ids) + len(each.response_token_ids) for each in trajectories)
        usual = work.groups_per_batch * self._settings.n * (work.prompt_tokens + float(work.lengths.mean()))
        return work.train_s * num_tokens / usual * (1 + work.stale_train_share * is_stale)

    async def _report_progress(self, router: Router, scheduler: RolloutScheduler) -> None:
        """Tell the router what the engines have generated, as often as the health checks of a real run do."""
        try:
            while True:
                await asyncio.sleep(self._settings.health_check_interval_s)
                router.record_partial(await router.on_every(lambda engine: engine.progress()))
        except Exception as error:  # nobody awaits this task; `take` raises its error
            scheduler.fail(error)

    def _scheduler(self, router: Router) -> RolloutScheduler:
        work = self._workload
        token_ids = np.full(work.prompt_tokens, PROMPT_TOKEN, np.int32)
        prompts = [
            TokenizedPrompt(Prompt(f"simulated:{i}", (), "", "simulated"), token_ids)
            for i in range(work.groups_per_batch)
        ]
        stream = PromptStream([prompt.prompt for prompt in prompts], seed=self._seed, shuffle=False)
        deps = SchedulerDeps(
            stream, {prompt.prompt.prompt_id: prompt for prompt in prompts}, router, self._score, _decode, _no_failure
        )
        return RolloutScheduler(self._settings, work.groups_per_batch, self._seed, deps)

    async def _score(self, group: Group) -> ScoredGroups:
        """Give the trajectories different rewards, so that no group is dropped for having equal ones."""
        await asyncio.sleep(self._workload.score_s)
        trajectories = tuple(replace(t, reward=float(i)) for i, t in enumerate(group.trajectories))
        return ScoredGroups([Group(group.prompt, trajectories)], 0)

    async def _update_weights(self, scheduler: RolloutScheduler, engines: list[ModelledEngine]) -> None:
        self._version += 1

        async def load() -> None:
            await asyncio.gather(*(engine.load_weights(self._version) for engine in engines))

        await scheduler.update_weights(self._version, load)
        await asyncio.gather(*(engine.generate(PROBE) for engine in engines))
        scheduler.resume()


async def _decode(token_ids: np.ndarray) -> str:
    return f"{len(token_ids)} tokens"


def _no_failure(reason: Exception) -> None:
    raise AssertionError("a simulated engine never fails") from reason
