"""Reward that a server computes, with one JSON POST request per response.

The body has the keys of slime's `remote_rm` (slime/rollout/rm_hub/__init__.py), `prompt`, `response` and `label`, and
also `turns`, `finish_reason`, `data_source` and `metadata`. The server replies with a number, or with an object that
has a number under `score` or `reward`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import random
import re
from typing import Any

import httpx

from megatron_bapo.config.reward import MAX_RETRY_WAIT_S
from megatron_bapo.errors import RunError
from megatron_bapo.event_loop import answered_within

JSON = {"Content-Type": "application/json"}
SCORE_KEYS = ("score", "reward")
RETRIED_STATUS_CODES = (408, 425, 429)
"""Status codes below 500 after which a retry may succeed: request timeout, too early, too many requests."""
MAX_SHOWN = 200
"""Maximum number of characters of a server's reply in messages."""
MIN_SECRET = 4
"""Minimum number of characters of a parameter of the Authorization header that messages do not show."""


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    prompt: list[dict[str, str]],
    turns: list[dict[str, str]],
    finish_reason: str,
    url: str,
    timeout_s: float,
    max_retries: int,
    retry_wait_s: float,
    authorization_env: str | None,
) -> float:
    """Return the server's reward.

    Raises RunError with URL, number of tries and last reply: immediately if the server rejects the request or its reply
    has the wrong shape, and after the last retry if it is unreachable, times out, fails or sends invalid JSON.
    """
    body = {
        "prompt": prompt,
        "response": solution_str,
        "turns": turns,
        "finish_reason": finish_reason,
        "label": ground_truth,
        "data_source": data_source,
        "metadata": extra_info or {},
    }
    content = _encode(body, url)
    headers, num_tries, wait_s = _headers(authorization_env), 0, retry_wait_s
    while True:
        num_tries += 1
        try:
            return await _request(url, content, headers, timeout_s)
        except _NoRewardError as error:
            if num_tries > max_retries or not error.may_pass:
                tries = f"{num_tries} {'try' if num_tries == 1 else 'tries'}"
                raise RunError(
                    f"the reward server {url} gave no reward after {tries}; its last reply: {error}"
                ) from None
        await asyncio.sleep(min(wait_s, MAX_RETRY_WAIT_S) * random.uniform(0.5, 1.0))
        wait_s *= 2


class _NoRewardError(Exception):
    """One try failed; `may_pass` says whether the same request may succeed later."""

    def __init__(self, problem: str, *, may_pass: bool) -> None:
        super().__init__(problem)
        self.may_pass = may_pass


async def _request(url: str, content: bytes, headers: dict[str, str], timeout_s: float) -> float:
    """Return the reward of one try. Raises _NoRewardError, whose message shows no secret of the headers."""
    secrets = _secrets(headers)
    try:
        async with answered_within(timeout_s):
            reply = await _client().post(url, content=content, headers=JSON | headers)
    except TimeoutError:
        raise _NoRewardError(f"timeout after reward.timeout_s={timeout_s:g} s", may_pass=True) from None
    except httpx.RequestError as error:
        raise _NoRewardError(_masked(f"{type(error).__name__}: {error}", secrets), may_pass=True) from None
    text = _masked(reply.text, secrets)[:MAX_SHOWN]
    if not reply.is_success:
        may_pass = reply.status_code >= 500 or reply.status_code in RETRIED_STATUS_CODES
        raise _NoRewardError(f"status {reply.status_code}: {text!r}", may_pass=may_pass)
    try:
        value = reply.json()
    except ValueError:
        raise _NoRewardError(f"invalid JSON: {text!r}", may_pass=True) from None
    is_object = isinstance(value, dict)
    score = next((value[key] for key in SCORE_KEYS if key in value), None) if is_object else value
    if isinstance(score, bool | int | float):
        return float(score)
    shown = _masked(repr(value), secrets)[:MAX_SHOWN]
    problem = f"{shown}, which is neither a number nor an object with one under 'score'"
    raise _NoRewardError(problem, may_pass=False)


def _secrets(headers: dict[str, str]) -> list[str]:
    """Return what messages must not show of the Authorization header, the longest first.

    These are its value, the credentials behind the scheme word, their parameters and what Basic encodes, each also as
    Python and JSON escape it.
    """
    found: set[str] = set()
    for value in headers.values():
        scheme, _, credentials = value.strip().partition(" ")
        credentials = credentials.strip() or scheme
        parts = re.split(r"[\s,;=\"]+", credentials)
        if scheme.lower() == "basic":
            with contextlib.suppress(ValueError):
                pair = base64.b64decode(credentials).decode()
                parts += [pair, pair.partition(":")[2]]
        found |= {value, value.strip(), credentials, *(part for part in parts if len(part) >= MIN_SECRET)}
    escaped = {form(secret)[1:-1] for secret in found for form in (repr, json.dumps)}
    return sorted((found | escaped) - {""}, key=len, reverse=True)


def _masked(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _encode(body: dict[str, Any], url: str) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        given = f"extra_info={body['metadata']!r:.{MAX_SHOWN}}"
        raise RunError(f"cannot send {given} to the reward server {url} as JSON: {error}") from None


@functools.cache
def _client() -> httpx.AsyncClient:
    """Return the client of this process, which has one event loop. Timeouts are set per request, not in the client."""
    return httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64))


def _headers(authorization_env: str | None) -> dict[str, str]:
    return {} if authorization_env is None else {"Authorization": os.environ[authorization_env]}
