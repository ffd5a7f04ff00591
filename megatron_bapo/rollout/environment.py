"""Environments reply to the policy between the turns of a trajectory, as a tool does.

An environment is a function of the conversation, `reply(messages, data_source, ground_truth, extra_info)`, that returns
the reply to the last message, or None to end the trajectory. It keeps no state between calls, so a trajectory can
continue on another worker or in a resumed run from its messages alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np

from megatron_bapo.config.data import PromptConfig
from megatron_bapo.config.reward import EnvironmentConfig
from megatron_bapo.errors import UserError
from megatron_bapo.functions.sandbox import check_sandbox
from megatron_bapo.functions.user_function import Target
from megatron_bapo.functions.worker_pool import FunctionPool
from megatron_bapo.records import Prompt
from megatron_bapo.rollout.in_flight_group import Reply
from megatron_bapo.rollout.tokenization import in_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ARGUMENTS = ("messages", "data_source", "ground_truth", "extra_info")
BUILT_IN = {
    "calculator": "megatron_bapo.environments.calculator:reply",
    "python": "megatron_bapo.environments.python_tool:reply",
}
_TURN, _CONTENT = "0turn0", "0content0"
"""Placeholder texts for rendering a chat template; no template changes plain letters and digits."""
_SUPPORTED_ROLE = "Set environment.role to the role that it supports, tool or user"


class FunctionEnvironment:
    """Runs the environment's function in worker processes with a time limit, and encodes its replies."""

    def __init__(
        self,
        config: EnvironmentConfig,
        data: PromptConfig,
        tokenizer: PreTrainedTokenizerBase,
        withheld: tuple[str, ...] = (),
    ) -> None:
        """`withheld` names environment variables that are hidden from the function.

        Raises UserError if the function cannot be loaded, the chat template has no place for replies, or the machine
        cannot make a sandbox that the function needs.
        """
        if config.type == "python":
            check_sandbox()
        self._config = config
        self.num_timeouts = 0
        """Number of calls that timed out since the start."""
        # A reply of 100,000 characters takes a tenth of a second, which would stop the event loop. The thread has a
        # tokenizer of its own, because encoding sets options of the tokenizer.
        self._encode = reply_encoder(deepcopy(tokenizer), config.role, data)
        self._thread = ThreadPoolExecutor(1, "environment replies")
        self._pool = FunctionPool(
            environment_target(config, withheld),
            num_workers=config.num_workers,
            concurrency=config.concurrency,
            timeout_s=config.timeout_s,
        )

    @property
    def max_turns(self) -> int:
        return self._config.max_turns

    def close(self) -> None:
        self._pool.close()
        self._thread.shutdown(cancel_futures=True)

    async def reply(self, prompt: Prompt, turns: Sequence[dict[str, str]]) -> Reply | None:
        """Return the reply to the last of `turns`, or None to end the trajectory; raises as `FunctionPool.call`."""
        result = await self._pool.call(
            {
                "messages": [*prompt.messages, *turns],
                "data_source": prompt.data_source,
                "ground_truth": prompt.ground_truth,
                "extra_info": prompt.extra_info,
            },
            f"a turn of a response to prompt {prompt.prompt_id} that starts with {turns[-1]['content'][:120]!r}",
        )
        self.num_timeouts += result.timed_out
        content = self._config.timeout_reply if result.timed_out else result.value
        if content is None:
            return None
        token_ids = await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, content)
        return Reply({"role": self._config.role, "content": content}, token_ids)


def reply_encoder(tokenizer: PreTrainedTokenizerBase, role: str, data: PromptConfig) -> Callable[[str], np.ndarray]:
    """Return a function that encodes a reply as int32 tokens to append to a turn.

    A turn ends with the end-of-sequence token. With a chat template the tokens include all that the template renders
    between that token and the start of the policy's next turn. A reply's text is never encoded as a special token.
    Raises UserError if the template does not end a turn with that token, or refuses or leaves out messages of this
    role.
    """
    before = after = ""
    if data.chat_template:
        messages = [
            {"role": "user", "content": _TURN},
            {"role": "assistant", "content": _TURN},
            {"role": role, "content": _CONTENT},
        ]
        text = in_chat_template(messages, tokenizer, data, f"a reply with environment.role={role}", _SUPPORTED_ROLE)
        _, _, rest = text.rpartition(_TURN)
        before, found, after = rest.partition(_CONTENT)
        if not found or not before.startswith(end := str(tokenizer.eos_token)):
            raise UserError(
                f"the chat template must render a turn, its end {tokenizer.eos_token!r} and a reply with the role "
                f"{role} in this order; after the turn it renders {rest[:120]!r}. {_SUPPORTED_ROLE}, or set "
                "data.chat_template=false"
            )
        before = before.removeprefix(end)
    prefix, suffix = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))

    def encode(content: str) -> np.ndarray:
        token_ids = tokenizer.encode(content, add_special_tokens=False, split_special_tokens=True)
        return np.asarray([*prefix, *token_ids, *suffix], np.int32)

    return encode


def environment_target(config: EnvironmentConfig, withheld: tuple[str, ...]) -> Target:
    """Return the environment's function as worker processes load it."""
    return Target(
        name=f"environment.type={config.type}"
        if config.function is None
        else f"environment.function={config.function}",
        spec=config.function or BUILT_IN[config.type],
        arguments=ARGUMENTS,
        returns="reply",
        settings=config.sandbox.model_dump(mode="json") if config.type == "python" else {},
        withheld=withheld,
        memory_key="environment.worker_memory_gib",
        memory_gib=config.worker_memory_gib,
    )
