"""What `train --dry-run` shows: one rendered prompt, the reward's scores of it, and what the run directory holds.

Nothing stays written, and nothing is started but the processes of the user's functions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from megatron_bapo.commands.plain_text import escaped, shortened
from megatron_bapo.commands.saved_run import saved_run
from megatron_bapo.config.reward import RewardConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.controller.preflight import Inputs, read_inputs
from megatron_bapo.controller.terminal import Show
from megatron_bapo.errors import FunctionFailed, RunError
from megatron_bapo.metrics.wandb_key import missing_key
from megatron_bapo.records import Prompt
from megatron_bapo.rewards.scorer import RewardRequest, RewardResult, Scorer
from megatron_bapo.rollout.tokenization import render

MAX_PROMPT_CHARACTERS = 1500
"""Longer prompts are shortened in the middle."""
MAX_GROUND_TRUTH_CHARACTERS = 200
Score = RewardResult | FunctionFailed | RunError


@dataclass(frozen=True)
class DryRun:
    """What is shown besides the arithmetic of the configuration."""

    prompt_title: str
    prompt: str
    """The first training prompt as the model gets it, shortened, with control characters escaped."""
    facts: list[str]
    """Lines about its ground truth, the reward, the environment and the run directory."""
    notes: tuple[str, ...]
    warnings: list[str]


def dry_run(config: Config, rollouts_from: Path | None, show: Show, *, rollout_only: bool = False) -> DryRun:
    """Read and check all inputs, and score the first prompt's ground truth. Raises UserError for unusable inputs."""
    with ExitStack() as stack:
        scorer = None
        if rollouts_from is None:
            threads = stack.enter_context(ThreadPoolExecutor(1))
            scorer = threads.submit(Scorer, _one_try(config.reward))  # starts while prompts are read
            stack.callback(_close, scorer)
        inputs = read_inputs(config, rollouts_from, show, reward=False)
        first, warnings = inputs.train[0].prompt, list[str]()
        ground_truth = escaped(first.ground_truth).replace("\n", "\\n")
        facts = [f"ground truth: {shortened(ground_truth, MAX_GROUND_TRUTH_CHARACTERS)}"]
        if scorer is not None:
            show("scoring the ground truth of the first prompt")
            scores = asyncio.run(_scores(scorer.result(), config.reward, first))
            fact, warning = _judged(config.reward, scores)
            facts.append(fact)
            warnings += [warning] if warning else []
    if (environment := config.environment) is not None:
        name = environment.function or environment.type
        facts.append(f"environment: {name}, at most {environment.max_turns} turns per response")
    if (saved := saved_run(config, rollout_only=rollout_only)) is not None:
        facts.append(saved)
    if (warning := missing_key(config.logging.wandb)) is not None and not rollout_only:
        warnings.append(warning)
    title, text = _rendered(config, inputs)
    return DryRun(title, text, facts, inputs.prompts.notes, warnings)


def _rendered(config: Config, inputs: Inputs) -> tuple[str, str]:
    lengths = [len(tokenized.token_ids) for tokenized in inputs.train]
    text = render(inputs.train[0].prompt, inputs.tokenizer, config.data)
    title = (
        f"first training prompt: {lengths[0]:,} tokens (the longest of {len(lengths):,} has {max(lengths):,}; "
        f"data.max_prompt_length={config.data.max_prompt_length})"
    )
    return title, shortened(escaped(text), MAX_PROMPT_CHARACTERS)


def _one_try(reward: RewardConfig) -> RewardConfig:
    """Return the reward with one process, and for a server without retries."""
    remote = None if reward.remote is None else reward.remote.model_copy(update={"max_retries": 0})
    return reward.model_copy(update={"num_workers": 1, "remote": remote})


def _close(scorer: Future[Scorer]) -> None:
    if scorer.exception() is None:
        scorer.result().close()


async def _scores(scorer: Scorer, reward: RewardConfig, prompt: Prompt) -> list[tuple[str, Score]]:
    """Score the ground truth, and if that gives a reward also an empty response. Closes the scorer."""
    scores: list[tuple[str, Score]] = []
    with closing(scorer):
        for name, response in _responses(reward, prompt):
            scores.append((name, await _score(scorer, prompt, response)))
            if not _is_reward(scores[-1][1]):
                break
    return scores


async def _score(scorer: Scorer, prompt: Prompt, response: str) -> Score:
    request = RewardRequest(
        prompt_id=prompt.prompt_id,
        data_source=prompt.data_source,
        solution_str=response,
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        prompt=prompt.messages,
        turns=({"role": "assistant", "content": response},),
    )
    try:
        return await scorer.score(request)
    except (FunctionFailed, RunError) as error:
        return error


def _responses(reward: RewardConfig, prompt: Prompt) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the responses to score."""
    if reward.type == "math_verify":
        yield "the ground truth in \\boxed{}", _boxed(prompt.ground_truth)
    elif reward.type == "code":
        yield "a program without statements", "```python\n```"
    else:
        yield "the ground truth", prompt.ground_truth
    yield "an empty response", ""


def _boxed(ground_truth: str) -> str:
    """Return a response with the ground truth, of a JSON list of alternatives the first, as its final answer."""
    try:
        texts = json.loads(ground_truth)
    except (ValueError, RecursionError):
        texts = None
    text = texts[0] if isinstance(texts, list) and texts and isinstance(texts[0], str) else ground_truth
    return text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"


def _is_reward(score: Score) -> bool:
    return isinstance(score, RewardResult) and not score.timed_out


def _judged(reward: RewardConfig, scores: list[tuple[str, Score]]) -> tuple[str, str | None]:
    """Return a line with the scores, and a warning if they show that the reward fails or tells nothing apart."""
    name, last = scores[-1]
    key = f"reward.function={reward.function}" if reward.function is not None else f"reward.type={reward.type}"
    shown = "reward " + ", ".join(f"of {name} {_shown(score)}" for name, score in scores)
    if isinstance(last, FunctionFailed | RunError):
        message = escaped(str(last))
        if reward.remote is not None:  # the first line tells to mend the function
            message = f"{message.splitlines()[-1]} (training retries {reward.remote.max_retries} times)"
        return shown, f"the reward failed: {message}"
    if last.timed_out:
        return shown, (
            f"{key} did not score {name} within reward.timeout_s={reward.timeout_s:g} s. In training such a response "
            f"gets reward.timeout_reward={reward.timeout_reward}; make the function faster, or raise timeout_s"
        )
    best, empty = (score.reward for _, score in scores if isinstance(score, RewardResult))
    if best > empty or reward.type == "code":  # whose ground truths are tests, and no response to be preferred
        return shown, None
    partial = "" if reward.partial_credit else " (reward.partial_credit=false counts only full scores)"
    return shown, (
        f"{key} gives the ground truth {_number(best)} and an empty response {_number(empty)}{partial}, so it does not "
        "prefer a right response. This is expected of a reward that requires a format or ignores the ground truth; "
        "otherwise check the ground truths and the reward"
    )


def _shown(score: Score) -> str:
    if not isinstance(score, RewardResult):
        return "failed"
    return "timed out" if score.timed_out else _number(score.reward)


def _number(reward: float) -> str:
    return str(round(reward, 4))
