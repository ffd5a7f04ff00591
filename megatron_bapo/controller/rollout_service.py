"""The rollout plane's actor: the scheduler of `rollout/producer.py` with Ray engines and reward processes around it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.engine_fleet import EngineActor, EngineFleet, EngineHome
from megatron_bapo.controller.prompt_sets import TaskPrompts, load_task_prompts, prompt_stream
from megatron_bapo.controller.run_state import RunDirectory
from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.logs import redirect_output
from megatron_bapo.metrics.cpu_time import family_cpu_s
from megatron_bapo.metrics.values import Last, Metric, Sum
from megatron_bapo.records import Group, HeldRollouts, Trajectory
from megatron_bapo.rewards.scorer import Scorer
from megatron_bapo.rollout.environment import FunctionEnvironment
from megatron_bapo.rollout.generation import (
    FailureAllowance,
    Sampling,
    ScoredGroups,
    SetAside,
    grow,
    growing_group,
)
from megatron_bapo.rollout.health import EngineHealth
from megatron_bapo.rollout.messages import AnsweredRequest
from megatron_bapo.rollout.producer import Producer, Surroundings
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.scoring import score_group
from megatron_bapo.rollout.tokenization import TokenizedPrompt, load_tokenizer, tokenize
from megatron_bapo.rollout.weight_probe import WeightProbe
from megatron_bapo.rollout.worked_examples import WorkedExamples, worked_example

_VALIDATION_ORDER = -1
"""Before all training prompts: the trainer waits for nothing else meanwhile."""
T = TypeVar("T")


class RolloutService:
    """One per run. Its methods run one at a time, but for what they await."""

    def __init__(
        self, config: Config, engines: dict[str, Any], starts: dict[str, Any], homes: Sequence[EngineHome]
    ) -> None:
        """`engines` are handles by name, `starts` the references that tell when each has started."""
        self._directory = RunDirectory(config.run_dir)
        redirect_output(self._directory.logs / "rollout-service.log")
        self._config = config
        self._starts = starts
        self._tokenizer = load_tokenizer(config.model_path)
        prompts: TaskPrompts = load_task_prompts(config)
        self._validation = tokenize(prompts.validation, self._tokenizer, config.data)
        self._prompts = tokenize(prompts.train, self._tokenizer, config.data)
        self._tokenized = {prompt.prompt.prompt_id: prompt for prompt in self._prompts}
        self._cpu_s = family_cpu_s()
        """When the last batch was handed out."""
        self._stream = prompt_stream(config, prompts.train)
        self._worked_examples = WorkedExamples(config, self._tokenizer)
        self._scorer = Scorer(config.reward)
        self._environment = None
        if config.environment is not None:
            self._environment = FunctionEnvironment(
                config.environment, config.data, self._tokenizer, config.reward.secret_variables
            )
        self._router = Router(lambda name, reason: self._health.on_lost(name, reason), self._record)
        self._producer = Producer(
            config.rollout,
            config.prompts_per_step,
            config.seed,
            Surroundings(
                self._stream,
                self._tokenized,
                self._router,
                self._score,
                self._decode,
                self._set_aside,
                self._environment,
            ),
        )
        self._fleet = EngineFleet(config, engines, homes)
        self._health = EngineHealth(
            self._router,
            self._fleet,
            self._record_engine,
            self._producer.fail,
            interval_s=config.rollout.health_check_interval_s,
            timeout_s=config.rollout.health_check_timeout_s,
            max_restarts=config.rollout.max_engine_restarts,
        )

    async def wait_for_engines(self) -> None:
        """Return when all engines serve the initial model; at once when they have."""
        starts, self._starts = self._starts, {}
        if not starts:
            return
        ready = await asyncio.gather(*(self._fleet.started(name, start) for name, start in starts.items()))
        for engine, kv_cache_tokens in ready:
            self._router.add(engine.name, engine, kv_cache_tokens)
        self._health.start()

    def probe_token_ids(self) -> np.ndarray:
        """The first prompts and their ground truths, up to `weight_sync.probe_tokens` tokens, int32."""
        config = self._config
        size = min(config.weight_sync.probe_tokens, config.max_model_len - 1)
        tokens: list[int] = []
        for prompt in self._tokenized.values():
            example = worked_example(prompt, self._tokenizer)
            tokens += [*example.prompt_token_ids.tolist(), *example.response_token_ids.tolist()]
            if len(tokens) >= size:
                break
        return np.asarray(tokens[:size], np.int32)

    async def worked_examples(self, num: int) -> list[Trajectory]:
        """Of the next training prompts, for the warm start."""
        return await self._worked_examples.of(self._producer.take_worked_examples(num))

    async def take(self) -> tuple[ScoredGroups, dict[str, float]]:
        """The next rollout batch, and the seconds that it was waited for."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        scored = await self._producer.take()
        cpu_s, self._cpu_s = self._cpu_s, family_cpu_s()
        scored.metrics["perf/cpu_s/rollouts"] = Last(self._cpu_s - cpu_s)
        scored.metrics["perf/cpu_cores"] = Last(len(os.sched_getaffinity(0)))
        scored.metrics["rollout/engine_restarts"] = Last(self._health.num_restarts)
        if self._environment is not None:
            scored.metrics["rollout/environment_timeouts"] = Last(self._environment.num_timeouts)
        return scored, {"generate": loop.time() - start}

    async def validate(self, seed: int) -> ScoredGroups:
        """Scored answers to every held-out prompt."""
        n, limits = self._config.evaluation.n, self._config.rollout
        allowance = FailureAllowance(limits.max_reward_failures)

        async def answered(prompt: TokenizedPrompt, index: int) -> ScoredGroups:
            try:
                return await self._answers(prompt, n, seed, index)
            except (SetAside, FunctionFailed) as error:
                self._set_aside(error if isinstance(error, SetAside) else allowance.use(prompt.prompt.prompt_id, error))
                return ScoredGroups([], 0)

        try:
            async with asyncio.timeout(limits.request_timeout_s):
                scored = await asyncio.gather(*(answered(prompt, i) for i, prompt in enumerate(self._validation)))
        except TimeoutError:
            raise RunError(
                f"held-out prompts have no answer within rollout.request_timeout_s={limits.request_timeout_s:.0f} s "
                f"from {self._router.unanswered()}"
            ) from None
        groups = [group for one in scored for group in one.groups]
        if not groups:
            raise RunError(f"every held-out prompt was set aside; {self._directory.set_aside} says why")
        metrics: dict[str, Metric] = {"validation/set_aside": Sum(len(self._validation) - len(groups))}
        return ScoredGroups(groups, sum(one.num_reward_timeouts for one in scored), metrics)

    async def answer(self, prompt: int, sample: int) -> ScoredGroups | None:
        """One scored answer to a training prompt, drawn as for held-out ones; None where engines failed too often."""
        try:
            return await self._answers(self._prompts[prompt], 1, self._config.seed, sample)
        except SetAside as reason:
            self._set_aside(reason)
            return None

    async def failed(self) -> None:
        """Wait for what ends generation, and raise it."""
        await self._producer.failed()

    async def load_weights(self, version: int) -> None:
        """Bring a published version to every engine; one that is lost over it comes back with that version."""

        async def load() -> None:
            async with self._health.weights:
                await self._router.on_every(lambda engine: engine.load_weights(version))
                self._fleet.policy_version = version

        await self._producer.refresh(version, load)

    async def sleep(self, level: int) -> None:
        """Every engine frees its memory, one that is just starting when it has; returns when all have."""
        await self._health.to_trainer()
        await self._on_every(lambda engine: engine.sleep(level))

    async def wake(self, tags: tuple[str, ...]) -> None:
        await self._on_every(lambda engine: engine.wake(tags))
        if "kv_cache" in tags:
            await self._health.to_engines()

    async def probe(self, probe: WeightProbe) -> list[float]:
        """By how much each serving engine differs, in nats; those that are being replaced are probed before they serve.

        Raises ProbeFailed for an engine that does not pass.
        """
        self._fleet.probe = probe
        scores = await self._on_every(lambda engine: engine.score(probe.token_ids))
        return [probe.difference(name, score) for name, score in scores.items()]

    async def _answers(self, prompt: TokenizedPrompt, n: int, seed: int, index: int) -> ScoredGroups:
        """As `evaluation` says."""
        settings = self._config.evaluation
        sampling = Sampling(
            n=n,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            max_response_length=self._config.rollout.max_response_length,
        )
        group = growing_group(prompt, sampling, batch_seed=seed, index=index, order=_VALIDATION_ORDER)
        limit = self._config.rollout.max_request_failures
        await grow(group, self._router.generate, self._decode, self._environment, max_failures=limit)
        return await self._score(group.group(self._decode))

    async def _on_every(self, action: Callable[[EngineActor], Awaitable[T]]) -> dict[str, T]:
        return await self._router.on_every(lambda engine: action(cast(EngineActor, engine)))

    def data_state(self) -> tuple[dict[str, Any], HeldRollouts]:
        state = {
            "stream": self._stream.state_dict(),
            "rollouts": self._producer.state_dict(),
            "records": self._directory.record_sizes(),
        }
        return state, self._producer.held()

    def restore_data_state(self, state: dict[str, Any], held: HeldRollouts) -> None:
        self._stream.load_state_dict(state["stream"])
        self._producer.load_state_dict(state["rollouts"], held)

    async def _score(self, group: Group) -> ScoredGroups:
        return await score_group(group, self._scorer)

    def _decode(self, token_ids: np.ndarray) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _record(self, answered: AnsweredRequest) -> None:
        _append(self._directory.requests, {"step": self._producer.num_batches + 1} | asdict(answered))

    def _set_aside(self, reason: SetAside) -> None:
        _append(self._directory.set_aside, {"prompt_id": reason.prompt_id, "failures": reason.failures})

    def _record_engine(self, name: str, event: str, reason: str) -> None:
        row = {"time_s": time.time(), "engine": name, "event": event, "reason": reason}
        _append(self._directory.engine_events, row)


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
