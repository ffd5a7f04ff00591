"""The sections `reward` and `environment`: functions that run in worker processes, ours or the user's."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_bapo.config.section import NonNegativeInt, Section

MAX_RETRY_WAIT_S = 30.0
REMOTE_MARGIN_S = 60.0
"""Beyond what all tries take, before the process that makes them counts as hanging."""


class RemoteRewardConfig(Section):
    """A server that scores answers over HTTP: one POST each, with `reward.timeout_s` for every try."""

    url: str
    """http:// or https://. It gets {"prompt", "response", "turns", "finish_reason", "label", "data_source",
    "metadata"} and answers with a number, or an object with one under `score` or `reward`."""
    max_retries: NonNegativeInt = 3
    """After a server that is out of reach, late, at fault (status 5xx, 408, 425, 429) or answers with broken JSON."""
    retry_wait_s: PositiveFloat = 1.0
    """Before the first retry; twice as long before each further one, up to 30 s."""
    authorization_env: str | None = None
    """Name of the environment variable with the `Authorization` header, such as `Bearer ...`; it is written nowhere,
    and an environment's processes do not get it."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"reward.remote.url is {url!r}; it must start with http:// or https:// and name a host")
        if "@" in parts.netloc or parts.query:
            raise ValueError(
                "reward.remote.url holds a user or a query, which messages would show; give secrets by "
                "reward.remote.authorization_env"
            )
        return url

    def limit_s(self, timeout_s: float) -> float:
        """In which all tries, with the waits between them, are made or something hangs."""
        waits = (min(self.retry_wait_s * 2**i, MAX_RETRY_WAIT_S) for i in range(self.max_retries))
        return (self.max_retries + 1) * timeout_s + sum(waits) + REMOTE_MARGIN_S


class RewardConfig(Section):
    """How an answer becomes a number."""

    type: Literal["reasoning_gym", "math_verify", "function", "remote"] = "math_verify"
    function: str | None = None
    """`path.to.module:function` with the arguments (data_source, solution_str, ground_truth, extra_info), `def` or
    `async def`; one that also has `prompt` or `turns` gets the chat messages of the prompt, or of the answer, and one
    that has `finish_reason` gets `length` where `rollout.max_response_length` cut the answer off, else `stop`."""
    remote: RemoteRewardConfig | None = None
    partial_credit: bool = True
    """`false` counts only a full score: 1 for it, 0 for less. Some reasoning-gym scorers reward near misses."""
    timeout_s: PositiveFloat = 10.0
    """Per answer. An answer that takes longer is killed, scores `timeout_reward` and is counted. With `type=remote` per
    try."""
    timeout_reward: float = 0.0
    truncated_reward: float | None = None
    """Of an answer that `rollout.max_response_length` cut off, which is then not scored; by default it is scored like
    any other. `math_verify` takes the last number of such a text for its answer."""
    num_workers: PositiveInt = 1
    """Processes."""
    concurrency: PositiveInt = 32
    """Answers that one process scores at a time where the function is `async def`, as a remote reward is."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "function") != (self.function is not None):
            raise ValueError("reward.function goes with reward.type=function, and only with it")
        if (self.type == "remote") != (self.remote is not None):
            raise ValueError("reward.remote goes with reward.type=remote, and only with it")
        check_spec("reward.function", self.function)
        return self

    @property
    def secret_variables(self) -> tuple[str, ...]:
        """Environment variables that no function but the reward may see."""
        return (self.remote.authorization_env,) if self.remote and self.remote.authorization_env else ()


class EnvironmentConfig(Section):
    """What answers the policy between the turns of an answer, such as a tool.

    A turn ends with the end-of-sequence token. The environment's tokens are context: they are not trained on.
    """

    type: Literal["calculator", "function"] = "calculator"
    """`calculator` replies to the last `<calculator>2 + 3</calculator>` of a turn."""
    function: str | None = None
    """`path.to.module:function` with the arguments (messages, data_source, ground_truth, extra_info), `def` or `async
    def`: the reply to the last message, or None when the answer is finished."""
    max_turns: Annotated[int, Field(ge=2)] = 4
    """Of the policy in one answer; after the last one nothing is asked."""
    role: Literal["tool", "user"] = "tool"
    """Of the replies, in the chat template."""
    timeout_s: PositiveFloat = 10.0
    """Per reply. A call that takes longer is killed, replies `timeout_reply` and is counted."""
    timeout_reply: Annotated[str, Field(min_length=1)] = "The time limit has passed."
    num_workers: PositiveInt = 1
    """Processes."""
    concurrency: PositiveInt = 32
    """Calls that one process runs at a time where the function is `async def`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "function") != (self.function is not None):
            raise ValueError("environment.function goes with environment.type=function, and only with it")
        check_spec("environment.function", self.function)
        return self


def check_spec(key: str, spec: str | None) -> None:
    """Raises ValueError for what is not the name of a function."""
    if spec is not None and spec.count(":") != 1:
        raise ValueError(f"{key} is {spec!r}; write it as path.to.module:function")
