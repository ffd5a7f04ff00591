"""The rollout plane's actor: owns the prompts, the engines and the reward workers; the trainer only asks it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bapo.config.schema import Config, SamplingConfig
from megatron_bapo.controller.cluster import answer
from megatron_bapo.controller.prompt_sets import TaskPrompts, load_task_prompts
from megatron_bapo.data.prompt_stream import PromptStream
from megatron_bapo.logs import redirect_output
from megatron_bapo.records import Trajectory
from megatron_bapo.rewards.scorer import Scorer
from megatron_bapo.rollout.generation import GenerateMany, Sampling, ScoredGroups, generate_groups, score_groups
from megatron_bapo.rollout.tokenization import load_tokenizer, tokenize, worked_example


class RolloutService:
    """One per run. Its methods run one at a time, but for what they await."""

    def __init__(self, config: Config, engines: dict[str, Any], starts: dict[str, Any], log_file: Path) -> None:
        """`engines` are handles by name, `starts` the references that tell when each has started."""
        redirect_output(log_file)
        self._config = config
        self._engines = engines
        self._starts = starts
        self._tokenizer = load_tokenizer(config.model_path)
        prompts: TaskPrompts = load_task_prompts(config)
        self._validation = tokenize(prompts.validation, self._tokenizer, config.data)
        tokenized = tokenize(prompts.train, self._tokenizer, config.data)
        self._tokenized = {prompt.prompt.prompt_id: prompt for prompt in tokenized}
        self._stream = PromptStream(prompts.train, seed=config.seed, shuffle=config.data.shuffle)
        self._scorer = Scorer(config.reward)

    async def wait_for_engines(self) -> None:
        """Return when all engines serve the initial model."""
        await asyncio.gather(*(answer(start, name) for name, start in self._starts.items()))

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
        return [worked_example(self._tokenized[p.prompt_id], self._tokenizer) for p in self._stream.take(num)]

    async def take(self, num_prompts: int, seed: int) -> tuple[ScoredGroups, dict[str, float]]:
        """The next prompts' scored groups, and the seconds each phase took."""
        rollout = self._config.rollout
        prompts = [self._tokenized[prompt.prompt_id] for prompt in self._stream.take(num_prompts)]
        return await self._answer(prompts, self._sampling(rollout, rollout.n, seed))

    async def validate(self, seed: int) -> ScoredGroups:
        """Scored answers to every held-out prompt."""
        evaluation = self._config.evaluation
        return (await self._answer(self._validation, self._sampling(evaluation, evaluation.n, seed)))[0]

    def _sampling(self, settings: SamplingConfig, n: int, seed: int) -> Sampling:
        return Sampling(
            n=n,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            max_response_length=self._config.rollout.max_response_length,
            seed=seed,
        )

    def data_state(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def restore_data_state(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state)

    async def _answer(self, prompts: list[Any], sampling: Sampling) -> tuple[ScoredGroups, dict[str, float]]:
        start = time.perf_counter()
        engines = [_remote(name, engine) for name, engine in self._engines.items()]
        groups = await generate_groups(engines, prompts, sampling)
        generated = time.perf_counter()
        scored = await asyncio.to_thread(score_groups, groups, self._scorer)
        return scored, {"generate": generated - start, "reward": time.perf_counter() - generated}


def _remote(name: str, engine: Any) -> GenerateMany:
    async def generate_many(requests: list[Any]) -> list[Any]:
        return await answer(engine.generate_many.remote(requests), name)

    return generate_many
