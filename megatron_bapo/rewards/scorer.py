"""Scores answers by the configured reward, in the processes of a `FunctionPool`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.functions.user_function import Target
from megatron_bapo.functions.worker_pool import FunctionPool
from megatron_bapo.records import FinishReason

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's keywords of a reward function."""
OPTIONAL_ARGUMENTS = ("prompt", "turns", "finish_reason")
"""For a function that has them: the chat messages of the prompt and of the answer, and `stop`, or `length` for an
answer that the limit cut off."""
BUILT_IN = {
    "math_verify": "megatron_bapo.rewards.math_answer:compute_score",
    "reasoning_gym": "megatron_bapo.rewards.reasoning_gym_answer:compute_score",
    "remote": "megatron_bapo.rewards.remote:compute_score",
}


@dataclass(frozen=True)
class RewardRequest:
    """One answer to score: verl's reward arguments, the conversation, and the prompt's name for messages."""

    prompt_id: str
    data_source: str
    solution_str: str
    """Of an answer with several turns, the last one."""
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    prompt: tuple[dict[str, str], ...] = ()
    """Chat messages."""
    turns: tuple[dict[str, str], ...] = ()
    """The answer as chat messages: the policy's turns and an environment's replies."""
    finish_reason: FinishReason = "stop"


@dataclass(frozen=True)
class RewardResult:
    reward: float
    timed_out: bool = False
    """The time limit passed, and the reward is `timeout_reward`."""
    answer: str | None = None
    """What was scored, where the function says so and found something."""


class Scorer:
    """Any number of answers at a time; an answer that takes long holds up no more than its own group."""

    def __init__(self, config: RewardConfig) -> None:
        """Raises UserError when the reward function cannot be loaded."""
        self._config = config
        self._pool = FunctionPool(
            reward_target(config),
            num_workers=config.num_workers,
            concurrency=config.concurrency,
            timeout_s=config.timeout_s if config.remote is None else config.remote.limit_s(config.timeout_s),
        )

    def close(self) -> None:
        self._pool.close()

    async def score(self, request: RewardRequest) -> RewardResult:
        """Raises what `FunctionPool.call` does."""
        if request.finish_reason == "length" and self._config.truncated_reward is not None:
            return RewardResult(self._config.truncated_reward)
        result = await self._pool.call(
            {
                "data_source": request.data_source,
                "solution_str": request.solution_str,
                "ground_truth": request.ground_truth,
                "extra_info": request.extra_info,
                "prompt": request.prompt,
                "turns": request.turns,
                "finish_reason": request.finish_reason,
            },
            f"an answer to prompt {request.prompt_id}, which starts {request.solution_str[:120]!r}",
        )
        if result.timed_out:
            return RewardResult(self._config.timeout_reward, timed_out=True)
        score, answer = result.value["score"], result.value["pred"]
        return RewardResult(score if self._config.partial_credit else float(score >= 1.0), answer=answer)


def reward_target(config: RewardConfig) -> Target:
    """The function that `config` asks for."""
    settings: dict[str, Any] = {}
    if config.remote is not None:
        settings = {"timeout_s": config.timeout_s, **config.remote.model_dump(mode="json")}
    return Target(
        name=f"reward.type={config.type}" if config.function is None else f"reward.function={config.function}",
        spec=config.function or BUILT_IN[config.type],
        arguments=ARGUMENTS,
        returns="score",
        optional_arguments=OPTIONAL_ARGUMENTS,
        settings=settings,
    )
