"""The rollout plane's actor: the scheduler of `rollout/producer.py` with Ray engines and reward processes around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_bapo.config.schema import Config
from megatron_bapo.controller.engine_fleet import EngineActor, EngineFleet, EngineHome, load_everywhere
from megatron_bapo.controller.prompt_sets import TaskPrompts, load_task_prompts
from megatron_bapo.controller.run_state import RunDirectory
from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.errors import RunError
from megatron_bapo.logs import redirect_output
from megatron_bapo.metrics.values import Last
from megatron_bapo.records import Trajectory
from megatron_bapo.rollout.generation import Sampling, ScoredGroups, SetAside, grow, growing_group
from megatron_bapo.rollout.health import EngineHealth
from megatron_bapo.rollout.messages import SequenceScore
from megatron_bapo.rollout.producer import Producer, Surroundings
from megatron_bapo.rollout.router import Router
from megatron_bapo.rollout.scoring import ScoringPool
from megatron_bapo.rollout.tokenization import TokenizedPrompt, load_tokenizer, tokenize, worked_example

_VALIDATION_ORDER = -1
"""Before all training prompts: the trainer waits for nothing else meanwhile."""
_POLL_S = 0.2


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
        tokenized = tokenize(prompts.train, self._tokenizer, config.data)
        self._tokenized = {prompt.prompt.prompt_id: prompt for prompt in tokenized}
        self._stream = PromptStream(prompts.train, seed=config.seed, shuffle=config.data.shuffle)
        self._scoring = ScoringPool(config.reward)
        self._router = Router(on_lost=lambda name, reason: self._health.on_lost(name, reason))
        self._producer = Producer(
            config.rollout,
            config.prompts_per_step,
            config.seed,
            Surroundings(
                self._stream, self._tokenized, self._router, self._scoring.score, self._decode, self._set_aside
            ),
        )
        self._fleet = EngineFleet(config, engines, homes)
        self._health = EngineHealth(
            self._router,
            self._fleet,
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

    def worked_examples(self, num: int) -> list[Trajectory]:
        """The next training prompts with their ground truths as answers."""
        return [worked_example(prompt, self._tokenizer) for prompt in self._producer.take_worked_examples(num)]

    async def take(self) -> tuple[ScoredGroups, dict[str, float]]:
        """The next rollout batch, and the seconds that it was waited for."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        scored = await self._producer.take()
        scored.metrics["rollout/engine_restarts"] = Last(self._health.num_restarts)
        return scored, {"generate": loop.time() - start}

    async def validate(self, seed: int) -> ScoredGroups:
        """Scored answers to every held-out prompt."""
        settings = self._config.evaluation
        sampling = Sampling(
            n=settings.n,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            max_response_length=self._config.rollout.max_response_length,
        )

        async def answered(prompt: TokenizedPrompt, index: int) -> ScoredGroups:
            group = growing_group(prompt, sampling, batch_seed=seed, index=index, order=_VALIDATION_ORDER)
            await grow(group, self._router.generate, max_failures=self._config.rollout.max_request_failures)
            return await self._scoring.score(group.group(self._decode))

        async with asyncio.timeout(self._config.rollout.request_timeout_s):
            scored = await asyncio.gather(*(answered(prompt, i) for i, prompt in enumerate(self._validation)))
        return ScoredGroups(
            [group for one in scored for group in one.groups], sum(one.num_reward_timeouts for one in scored)
        )

    async def load_weights(self, version: int) -> None:
        """Bring a published version to every engine; one that is lost over it comes back with that version."""

        async def load() -> None:
            async with self._health.weights:
                lost = await load_everywhere(self._router.engines, version)
                self._fleet.policy_version = version
            for name, reason in lost.items():
                self._router.remove(name, str(reason))

        await self._producer.refresh(version, load)

    async def sleep(self, level: int) -> None:
        """Every engine frees its memory; returns when all have."""
        await asyncio.gather(*(engine.sleep(level) for engine in self._engines()))

    async def wake(self, tags: tuple[str, ...]) -> None:
        await asyncio.gather(*(engine.wake(tags) for engine in self._engines()))

    async def score_probe(self, token_ids: np.ndarray) -> dict[str, SequenceScore]:
        """Each serving engine's log-probs of a sequence; waits while all of them are being replaced."""
        scores: dict[str, SequenceScore] = {}
        try:
            async with asyncio.timeout(self._config.rollout.start_timeout_s):
                while not scores:
                    for engine in self._engines():
                        scores[engine.name] = await engine.score(token_ids)
                    await asyncio.sleep(0.0 if scores else _POLL_S)
        except TimeoutError:
            raise RunError(
                f"no engine came back within rollout.start_timeout_s={self._config.rollout.start_timeout_s:.0f}; see "
                "the engines' logs"
            ) from None
        return scores

    def _engines(self) -> list[EngineActor]:
        """Those that serve."""
        return [engine for engine in self._router.engines.values() if isinstance(engine, EngineActor)]

    def data_state(self) -> dict[str, Any]:
        return {"stream": self._stream.state_dict(), "rollouts": self._producer.state_dict()}

    def restore_data_state(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state["stream"])
        self._producer.load_state_dict(state["rollouts"])

    def _decode(self, token_ids: np.ndarray) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _set_aside(self, reason: SetAside) -> None:
        row = {"prompt_id": reason.prompt_id, "failures": reason.failures}
        with self._directory.set_aside.open("a") as file:
            file.write(json.dumps(row) + "\n")
