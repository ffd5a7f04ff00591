"""Score responses with the configured reward in the processes of a `FunctionPool`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.functions.sandbox import check_sandbox
from megatron_bapo.functions.user_function import Target
from megatron_bapo.functions.worker_pool import FunctionPool
from megatron_bapo.records import FinishReason

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of verl's reward functions."""
OPTIONAL_ARGUMENTS = ("prompt", "turns", "finish_reason")
"""Keyword arguments for functions that declare them: chat messages of the prompt and of the response, and the finish
reason, `stop` or `length` (truncated)."""
BUILT_IN = {
    "math_verify": "megatron_bapo.rewards.math_answer:compute_score",
    "reasoning_gym": "megatron_bapo.rewards.reasoning_gym_answer:compute_score",
    "code": "megatron_bapo.rewards.code_answer:compute_score",
    "remote": "megatron_bapo.rewards.remote:compute_score",
    "none": "megatron_bapo.rewards.unscored:compute_score",
}


@dataclass(frozen=True)
class RewardRequest:
    """One response to score."""

    prompt_id: str
    """Id of the prompt, for error messages."""
    data_source: str
    solution_str: str
    """Text of the response; in a multi-turn response, of the last turn."""
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    prompt: tuple[dict[str, str], ...] = ()
    """Chat messages of the prompt."""
    turns: tuple[dict[str, str], ...] = ()
    """The response as chat messages: turns of the policy and replies of the environment."""
    finish_reason: FinishReason = "stop"


@dataclass(frozen=True)
class RewardResult:
    reward: float
    timed_out: bool = False
    """True if scoring timed out; the reward is then `timeout_reward`."""
    answer: str | None = None
    """Extracted answer, if the reward function returns one."""


class Scorer:
    """Scores any number of responses concurrently; a slow one delays only its own group."""

    def __init__(self, config: RewardConfig) -> None:
        """Start the worker processes.

        Raises UserError if the reward function cannot be loaded, or needs a sandbox that this machine cannot make.
        """
        self._config = config
        if config.type == "code":
            check_sandbox()
        self._pool = FunctionPool(
            reward_target(config),
            num_workers=config.num_workers,
            concurrency=config.concurrency,
            timeout_s=config.timeout_s if config.remote is None else config.remote.limit_s(config.timeout_s),
        )

    def close(self) -> None:
        self._pool.close()

    async def score(self, request: RewardRequest) -> RewardResult:
        """Return the reward of a response. Raises the errors of `FunctionPool.call`."""
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
            f"a response to prompt {request.prompt_id}, which starts {request.solution_str[:120]!r}",
        )
        if result.timed_out:
            return RewardResult(self._config.timeout_reward, timed_out=True)
        score, answer = result.value["score"], result.value["pred"]
        return RewardResult(score if self._config.partial_credit else float(score >= 1.0), answer=answer)


def reward_target(config: RewardConfig) -> Target:
    """Return the reward function that `config` selects."""
    settings: dict[str, Any] = {}
    if config.remote is not None:
        settings = {"timeout_s": config.timeout_s, **config.remote.model_dump(mode="json")}
    elif config.type == "code":
        settings = {"max_tests": config.max_tests, "all_tests": not config.partial_credit}
        settings |= config.sandbox.model_dump(mode="json")
    return Target(
        name=f"reward.type={config.type}" if config.function is None else f"reward.function={config.function}",
        spec=config.function or BUILT_IN[config.type],
        arguments=ARGUMENTS,
        returns="score",
        optional_arguments=OPTIONAL_ARGUMENTS,
        settings=settings,
        memory_key="reward.worker_memory_gib",
        memory_gib=config.worker_memory_gib,
    )
