"""Check that the configured reward can read the prompts' ground truths."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing

from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.errors import FunctionFailed, UserError
from megatron_bapo.records import Prompt
from megatron_bapo.rewards.scorer import RewardRequest, RewardResult, Scorer


def check_ground_truths(config: RewardConfig, prompts: Sequence[Prompt], allowed: int = 0) -> None:
    """Check that math-verify, the only built-in reward that can reject ground truths, reads those of the prompts.

    Equal ground truths are read once. Raises UserError with the first unreadable one and their number if there are more
    than `allowed`.
    """
    if config.type != "math_verify":
        return
    first = {prompt.ground_truth: prompt for prompt in reversed(prompts)}
    requests = [RewardRequest(prompt.prompt_id, prompt.data_source, "", text) for text, prompt in first.items()]
    results = dict(zip(first, asyncio.run(_score_all(config, requests)), strict=True))
    refused = [prompt for prompt in prompts if isinstance(results[prompt.ground_truth], FunctionFailed)]
    if len(refused) > allowed:
        why = str(results[refused[0].ground_truth]).splitlines()[-1]
        raise UserError(
            f"reward.type=math_verify cannot read {len(refused)} of {len(prompts)} ground truths; the first is that "
            f"of prompt {refused[0].prompt_id}, counted from 0: {why}; correct them or remove such rows"
        )


async def _score_all(config: RewardConfig, requests: Sequence[RewardRequest]) -> list[RewardResult | FunctionFailed]:
    with closing(Scorer(config)) as scorer:

        async def score(request: RewardRequest) -> RewardResult | FunctionFailed:
            try:
                return await scorer.score(request)
            except FunctionFailed as error:
                return error

        return await asyncio.gather(*map(score, requests))
