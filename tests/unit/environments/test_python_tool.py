"""The Python tool, in the real sandbox."""

import asyncio
from typing import Any

import pytest

from megatron_bapo.config.reward import EnvironmentConfig
from megatron_bapo.environments.python_tool import MAX_CHARACTERS
from megatron_bapo.functions.user_function import load
from megatron_bapo.rollout.environment import environment_target
from tests.sandboxes import needs_sandbox


def answer(text: str, **sandbox: float) -> Any:
    config = EnvironmentConfig(type="python", sandbox=sandbox)  # pyright: ignore[reportArgumentType]
    function = load(environment_target(config, ())).call
    messages = [{"role": "user", "content": "<python>print(1)</python>"}, {"role": "assistant", "content": text}]
    return asyncio.run(function(messages=messages, data_source="d", ground_truth="42", extra_info={}))


@needs_sandbox
@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("<python>print(6 * 7)</python>", "42"),
        ("I run <python>\n    x = 6\n    print(x * 7)\n</python> and wait.", "42"),
        ("<python>x = 1</python><python>print(2)</python>", "2"),
        ("<python>x = 1</python>", "(no output)"),
        ("<python>raise SystemExit(3)</python>", "error: exit status 3"),
        ("<python>while True: pass</python>", "error: more than 1 s of CPU time"),
        ("<python>while True: print('x' * 1000)</python>", "error: too much output"),
    ],
)
def test_the_reply_is_what_the_last_program_prints(text: str, reply: str) -> None:
    assert answer(text, cpu_s=1.0).endswith(reply)


@needs_sandbox
def test_errors_follow_the_output() -> None:
    reply = answer("<python>print('before')\nprint(1 / 0)</python>")
    assert reply.startswith("before\nTraceback")
    assert '"/program.py", line 2' in reply
    assert reply.endswith("ZeroDivisionError: division by zero")


@needs_sandbox
def test_a_long_reply_is_shortened_in_its_middle() -> None:
    reply = answer("<python>print('a' * 5000 + 'b' * 5000)\nraise ValueError('end')</python>")
    assert reply.startswith("aaa")
    assert reply.endswith("ValueError: end")
    assert MAX_CHARACTERS < len(reply) < MAX_CHARACTERS + 50


def test_a_turn_without_a_call_ends_the_response() -> None:
    assert answer("It is 42.") is None
    assert answer("<python>print(1)") is None
