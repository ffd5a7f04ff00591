"""The sections `reward` and `environment`: built-in or user-defined functions that run in worker processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_bapo.config.section import FunctionName, NonNegativeInt, Section, check_required

MAX_RETRY_WAIT_S = 30.0
"""Longest wait between two attempts at a remote reward, in seconds."""
REMOTE_MARGIN_S = 60.0
"""Seconds beyond the time of all attempts after which the process that makes them counts as hanging."""
FREE_FUNCTION_KEYS = (
    *("reward.num_workers", "reward.concurrency", "reward.timeout_s", "reward.worker_memory_gib", "reward.remote"),
    *("environment.num_workers", "environment.concurrency", "environment.timeout_s", "environment.worker_memory_gib"),
)
"""Keys that a continued run or evaluation may change: those that decide where and how fast the functions run."""


class RemoteRewardConfig(Section):
    """A server that scores responses over HTTP, with one POST request per response."""

    url: str
    """URL of the server, http:// or https://. The request body has the keys {"prompt", "response", "turns",
    "finish_reason", "label", "data_source", "metadata"}; the reply is a number, or an object with a number under
    `score` or `reward`."""
    max_retries: NonNegativeInt = 3
    """Number of retries after a connection error, a timeout (`reward.timeout_s` per attempt), status 5xx, 408, 425 or
    429, or a reply that is not JSON."""
    retry_wait_s: PositiveFloat = 1.0
    """Seconds before the first retry; the wait doubles with every further retry, up to 30 s."""
    authorization_env: str | None = None
    """Name of the environment variable that holds the `Authorization` header, such as `Bearer ...`. Its value is never
    written to files, and the processes of `environment` do not receive it."""

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"reward.remote.url is {url!r}; it must start with http:// or https:// and name a host")
        if "@" in parts.netloc or parts.query:
            raise ValueError(
                "reward.remote.url has a user or a query, which messages and logs would show; pass secrets with "
                "reward.remote.authorization_env"
            )
        return url

    def limit_s(self, timeout_s: float) -> float:
        """Return the seconds after which all attempts, with the waits between them, must have ended."""
        waits = (min(self.retry_wait_s * 2**i, MAX_RETRY_WAIT_S) for i in range(self.max_retries))
        return (self.max_retries + 1) * timeout_s + sum(waits) + REMOTE_MARGIN_S


class SandboxConfig(Section):
    """Limits of a Python program that the policy wrote. Each of its processes has them for itself."""

    cpu_s: PositiveFloat = 6.0
    """CPU seconds of one run of the program, rounded up to whole seconds."""
    memory_gib: PositiveFloat = 1.0
    """Address space in GiB."""


class RewardConfig(Section):
    """Scoring of responses."""

    type: Literal["reasoning_gym", "math_verify", "code", "function", "remote", "none"] = "math_verify"
    """Reward function: reasoning-gym's scorer of the task, math-verify's comparison with the ground truth, tests of a
    Python program in a sandbox, the user's own function, or a server. `none` gives every response 0, for
    algorithm.objective=distill without a reward."""
    function: FunctionName | None = None
    """The user's function, `path.to.module:function`, with the arguments (data_source, solution_str, ground_truth,
    extra_info), `def` or `async def`; required by `type=function`. It may also take `prompt` and `turns` (the chat
    messages of the prompt and of the response) and `finish_reason` (`length` for a truncated response, else `stop`)."""
    remote: RemoteRewardConfig | None = None
    sandbox: SandboxConfig = SandboxConfig()
    max_tests: PositiveInt | None = None
    """Number of tests of a program, the first ones, with `type=code`; null: all."""
    partial_credit: bool = True
    """Keep scores between 0 and 1, which some reasoning-gym scorers give to near misses, and `type=code` to programs
    that pass a share of the tests. `false` gives 1 for a score of 1 or more, and 0 otherwise."""
    timeout_s: PositiveFloat = 10.0
    """Timeout of one response in seconds (with `type=remote`, of one attempt). A call that exceeds it is killed and
    counted, and the response gets `timeout_reward`."""
    timeout_reward: float = 0.0
    """Reward of a response whose scoring timed out."""
    truncated_reward: float | None = None
    """Reward of a response that reached its maximum length without an end; null: it is scored like any other, and
    `math_verify` reads the last number in the text as the result."""
    num_workers: PositiveInt = 1
    """Number of worker processes."""
    concurrency: PositiveInt = 32
    """Number of responses that one process scores at a time if the function is `async def`, as with `type=remote`
    and `type=code`."""
    worker_memory_gib: PositiveFloat | None = 4.0
    """Limit of the private writable memory of a worker process, and of each process that it starts, in GiB (Linux's
    RLIMIT_DATA). A function that exceeds it gets a MemoryError; null: no limit."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        is_function, is_remote = self.type == "function", self.type == "remote"
        check_required("reward.function", self.function, "reward.type=function", is_chosen=is_function)
        check_required("reward.remote", self.remote, "reward.type=remote", is_chosen=is_remote)
        return self

    @property
    def secret_variables(self) -> tuple[str, ...]:
        """Environment variables that only the reward function may read."""
        return (self.remote.authorization_env,) if self.remote and self.remote.authorization_env else ()


class EnvironmentConfig(Section):
    """An environment, such as a tool, that replies to the policy between the turns of a response.

    A turn ends with the end-of-sequence token. The tokens of replies are context: they are not trained on.
    """

    type: Literal["calculator", "python", "function"] = "calculator"
    """Environment: `calculator` replies to the last `<calculator>2 + 3</calculator>` of a turn, `python` with what the
    program in the last `<python>print(2 + 3)</python>` prints in a sandbox; `function` is the user's own."""
    sandbox: SandboxConfig = SandboxConfig()
    function: FunctionName | None = None
    """The user's function, `path.to.module:function`, with the arguments (messages, data_source, ground_truth,
    extra_info), `def` or `async def`; required by `type=function`. It returns the reply to the last message, or None to
    end the response."""
    max_turns: Annotated[int, Field(ge=2)] = 4
    """Maximum number of the policy's turns in one response; the environment is not called after the last one."""
    role: Literal["tool", "user"] = "tool"
    """Role of the replies in the chat template."""
    timeout_s: PositiveFloat = 10.0
    """Timeout of one reply in seconds. A call that exceeds it is killed and counted, and the reply is
    `timeout_reply`."""
    timeout_reply: Annotated[str, Field(min_length=1)] = "The time limit has passed."
    """Reply after a timeout."""
    num_workers: PositiveInt = 1
    """Number of worker processes."""
    concurrency: PositiveInt = 32
    """Number of calls that one process runs at a time if the function is `async def`."""
    worker_memory_gib: PositiveFloat | None = 4.0
    """Limit of the private writable memory of a worker process, and of each process that it starts, in GiB (Linux's
    RLIMIT_DATA). A function that exceeds it gets a MemoryError; null: no limit."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        is_function = self.type == "function"
        check_required("environment.function", self.function, "environment.type=function", is_chosen=is_function)
        return self


def missing_variables(reward: RewardConfig) -> Iterator[str]:
    """Yield what to do if the variable with the credentials of a reward server is not set."""
    for name in reward.secret_variables:
        if not os.environ.get(name):
            yield (
                f"reward.remote.authorization_env={name} names an environment variable that is not set; set it to the "
                "whole Authorization header, such as 'Bearer ...'"
            )
