"""Errors with one complete message each (value, rule, way out), and the exit codes of commands."""

from __future__ import annotations

import sys
from collections.abc import Callable

USER_ERROR, RUN_ERROR, INTERRUPTED = 2, 1, 130
"""Exit codes of wrong input, of a failed part of the run, and of Ctrl-C."""


class UserError(ValueError):
    """The user's input breaks a rule. Commands print the message and exit with 2."""


class RunError(RuntimeError):
    """A part of the run failed, such as an engine that died. Commands print the message, without a trace, and exit
    with 1."""


class ProbeFailed(RunError):
    """An engine's log-probs differ from the trainer's. The run is not restarted, because this seldom goes away."""


class StorageFailed(RunError):
    """A file system takes no more writes. The run is not restarted, because somebody must free space first."""


class FunctionFailed(UserError):
    """A user's function raised, returned an invalid value or ended its process for one response. Others may succeed."""


def code_of(error: BaseException) -> int:
    """Return the exit code of a command that this error ends."""
    if isinstance(error, UserError):
        return USER_ERROR
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else RUN_ERROR


def exit_code(run: Callable[[], int], *, after_stop: str = "the same command continues") -> int:
    """Return what `run` returns, or print the project's errors and Ctrl-C as one message and return their exit code.

    The message goes to stderr. `after_stop` is the message's second half after Ctrl-C.
    """
    try:
        return run()
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return code_of(error)
    except KeyboardInterrupt:
        print(f"stopped; {after_stop}", file=sys.stderr)
        return INTERRUPTED
