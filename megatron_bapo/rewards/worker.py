"""The process that scores answers: `python -m megatron_bapo.rewards.worker FILE_DESCRIPTOR`, started by `scorer.py`.

A program of its own rather than a multiprocessing child, which would import the parent's main module, Torch and Ray
included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from megatron_bapo.config.schema import RewardConfig
from megatron_bapo.errors import UserError
from megatron_bapo.rewards.score import Score
from megatron_bapo.rewards.scorer import START_LIMIT_S

ORPHAN_GRACE_S = 2.0
TRACE_LINES = 6


def build_score_function(config: RewardConfig) -> Callable[..., Score]:
    """The function that `config` asks for, with verl's four keyword arguments; imports only what it needs."""
    compute_score = _load(config)
    return compute_score if config.partial_credit else lambda **arguments: _all_or_nothing(compute_score(**arguments))


def _all_or_nothing(score: Score) -> Score:
    return Score(score >= 1.0, score.answer)


def _load(config: RewardConfig) -> Callable[..., Score]:
    match config.type:
        case "math_verify":
            from megatron_bapo.rewards.math_answer import compute_score

            return compute_score
        case "reasoning_gym":
            from megatron_bapo.rewards.reasoning_gym_answer import compute_score

            return compute_score
        case "function":
            from megatron_bapo.rewards import user_function

            assert config.function is not None, "the schema requires reward.function with reward.type=function"
            return user_function.load(config.function)


@contextlib.contextmanager
def ended_after(limit_s: float) -> Iterator[None]:
    """Bound a computation also when the parent, which kills late workers, is gone: the kernel ends this process."""
    signal.setitimer(signal.ITIMER_REAL, limit_s + ORPHAN_GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(connection: Connection) -> None:
    """Receive the configuration, answer `ready`; then answer every request with `reward` or `failed`, until the end."""
    config: RewardConfig = connection.recv()
    try:
        with ended_after(START_LIMIT_S):
            compute_score = build_score_function(config)
    except UserError as error:
        connection.send(("failed", str(error)))
        return
    connection.send(("ready", None))
    while True:
        arguments: dict[str, Any] = connection.recv()
        try:
            with ended_after(config.timeout_s):
                reply = ("reward", compute_score(**arguments))
        except Exception:  # The user's code: everything it raises is reported with its place.
            reply = ("failed", "\n".join(traceback.format_exc().splitlines()[-TRACE_LINES:]))
        connection.send(reply)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file_descriptor = int(sys.argv[1])
    os.set_inheritable(file_descriptor, False)
    try:
        serve(Connection(file_descriptor))
    except (EOFError, ConnectionError):
        sys.exit(0)  # The parent has closed its end, or died.
