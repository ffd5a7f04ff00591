"""Demonstrations for the supervised warm start: ground truths or the output of a user function, as trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_bapo.config.schema import Config
from megatron_bapo.errors import RunError, UserError
from megatron_bapo.functions.user_function import Target
from megatron_bapo.functions.worker_pool import FunctionPool
from megatron_bapo.records import Trajectory, VersionSpan
from megatron_bapo.rollout.environment import ARGUMENTS, reply_encoder
from megatron_bapo.rollout.tokenization import TokenizedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SftDemonstrations:
    """Creates demonstrations; `warm_start.demonstration` runs in worker processes with a time limit."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises UserError if the function cannot be loaded, or the chat template has no place for replies."""
        self._tokenizer = tokenizer
        self._max_tokens = config.rollout.max_response_length
        self._pool = None
        target = demonstration_target(config)
        if target is None:
            return
        environment = config.environment
        assert environment is not None, "a demonstration without an environment is refused"
        self._name = target.name
        self._encode = reply_encoder(tokenizer, environment.role, config.data)
        self._pool = FunctionPool(
            target,
            num_workers=environment.num_workers,
            concurrency=environment.concurrency,
            timeout_s=environment.timeout_s,
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    async def for_prompts(self, prompts: Sequence[TokenizedPrompt]) -> list[Trajectory]:
        """Return one demonstration for each prompt.

        Raises the errors of `FunctionPool.call`, RunError for a demonstration that exceeds its time limit, and
        UserError for one that is longer than `rollout.max_response_length`.
        """
        if self._pool is None:
            return [self._ground_truth(prompt) for prompt in prompts]
        return await asyncio.gather(*(self._call_function(prompt, self._pool) for prompt in prompts))

    async def _call_function(self, tokenized: TokenizedPrompt, pool: FunctionPool) -> Trajectory:
        prompt = tokenized.prompt
        values = (list(prompt.messages), prompt.data_source, prompt.ground_truth, prompt.extra_info)
        result = await pool.call(dict(zip(ARGUMENTS, values, strict=True)), f"prompt {prompt.prompt_id}")
        if result.timed_out:
            raise RunError(f"{self._name} took longer than environment.timeout_s on prompt {prompt.prompt_id}")
        demonstration = sft_demonstration(tokenized, self._tokenizer, result.value, self._encode)
        return self._checked(demonstration, self._name, prompt.prompt_id, "shorten the demonstration")

    def _ground_truth(self, tokenized: TokenizedPrompt) -> Trajectory:
        demonstration = sft_demonstration(tokenized, self._tokenizer)
        way_out = "leave the prompt out, or set warm_start.demonstration to a function that shows shorter examples"
        return self._checked(demonstration, "the ground truth", tokenized.prompt.prompt_id, way_out)

    def _checked(self, demonstration: Trajectory, name: str, prompt_id: str, way_out: str) -> Trajectory:
        """Return the demonstration. Raises UserError if it is longer than a response may be."""
        if (num := len(demonstration.response_token_ids)) > self._max_tokens:
            raise UserError(
                f"{name} has {num} tokens for prompt {prompt_id}, and rollout.max_response_length is "
                f"{self._max_tokens}; raise it, or {way_out}"
            )
        return demonstration


def demonstration_target(config: Config) -> Target | None:
    """Return the function that creates demonstrations; None if ground truths are used."""
    if config.warm_start is None or (spec := config.warm_start.demonstration) is None:
        return None
    assert config.environment is not None, "the configuration's rules refuse a demonstration without an environment"
    return Target(
        name=f"warm_start.demonstration={spec}",
        spec=spec,
        arguments=ARGUMENTS,
        returns="turns",
        withheld=config.reward.secret_variables,
        memory_key="environment.worker_memory_gib",
        memory_gib=config.environment.worker_memory_gib,
    )


def sft_demonstration(
    tokenized: TokenizedPrompt,
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[str] = (),
    encode_reply: Callable[[str], np.ndarray] | None = None,
) -> Trajectory:
    """Return a demonstration as if it had been sampled.

    `turns` alternates between turns of the policy and replies; by default it is the ground truth alone.
    """
    parts: list[np.ndarray] = []
    for index, text in enumerate(turns or [tokenized.prompt.ground_truth]):
        if index % 2:
            assert encode_reply is not None, "replies are encoded by the environment's encoder"
            parts.append(encode_reply(text))
        else:
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            parts.append(np.asarray([*token_ids, tokenizer.eos_token_id], np.int32))
    response = np.concatenate(parts)
    loss_mask = np.concatenate([np.full(len(part), index % 2 == 0) for index, part in enumerate(parts)])
    num_sampled = int(loss_mask.sum())
    return Trajectory(
        prompt_token_ids=tokenized.token_ids,
        response_token_ids=response,
        behaviour_log_probs=np.zeros(num_sampled, np.float32),
        version_spans=(VersionSpan(0, num_sampled),),
        finish_reason="stop",
        text=str(tokenizer.decode(response, skip_special_tokens=True, clean_up_tokenization_spaces=False)),
        reward=1.0,
        loss_mask=loss_mask if len(parts) > 1 else None,
    )
