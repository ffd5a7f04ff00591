"""Check that the configured reward can read the prompts' ground truths."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing

from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.errors import FunctionFailed, UserError
from megatron_bapo.records import Prompt
from megatron_bapo.rewards.code_tests import read_tests
from megatron_bapo.rewards.scorer import RewardRequest, RewardResult, Scorer


def check_ground_truths(config: RewardConfig, prompts: Sequence[Prompt], allowed: int = 0) -> None:
    """Check that a built-in reward that can reject ground truths, `math_verify` or `code`, reads those of the prompts.

    Raises UserError with the first unreadable one and their number if there are more than `allowed`.
    """
    if config.type == "math_verify":
        problems = _math_problems(config, prompts)
    elif config.type == "code":
        problems = [_tests_problem(prompt) for prompt in prompts]
    else:
        return
    refused = [(prompt, why) for prompt, why in zip(prompts, problems, strict=True) if why is not None]
    if len(refused) > allowed:
        prompt, why = refused[0]
        raise UserError(
            f"reward.type={config.type} cannot read {len(refused)} of {len(prompts)} ground truths; the first is that "
            f"of prompt {prompt.prompt_id}, counted from 0: {why}; correct them or remove such rows"
        )


def _math_problems(config: RewardConfig, prompts: Sequence[Prompt]) -> list[str | None]:
    """Return why math-verify cannot read each ground truth; equal ones are read once."""
    first = {prompt.ground_truth: prompt for prompt in reversed(prompts)}
    requests = [RewardRequest(prompt.prompt_id, prompt.data_source, "", text) for text, prompt in first.items()]
    results = dict(zip(first, asyncio.run(_score_all(config, requests)), strict=True))
    found = (results[prompt.ground_truth] for prompt in prompts)
    return [str(result).splitlines()[-1] if isinstance(result, FunctionFailed) else None for result in found]


def _tests_problem(prompt: Prompt) -> str | None:
    try:
        read_tests(prompt.ground_truth, prompt.extra_info)
    except ValueError as error:
        return str(error)
    return None


async def _score_all(config: RewardConfig, requests: Sequence[RewardRequest]) -> list[RewardResult | FunctionFailed]:
    with closing(Scorer(config)) as scorer:

        async def score(request: RewardRequest) -> RewardResult | FunctionFailed:
            try:
                return await scorer.score(request)
            except FunctionFailed as error:
                return error

        return await asyncio.gather(*map(score, requests))
