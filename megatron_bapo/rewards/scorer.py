"""Scores answers in worker processes that can be killed, because a reward function may hang, crash or never end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, Self

from megatron_bapo.config.schema import RewardConfig
from megatron_bapo.errors import FunctionFailed, RunError, UserError

START_LIMIT_S = 300.0
KILL_LIMIT_S = 10.0


@dataclass(frozen=True)
class RewardRequest:
    """One answer to score: verl's reward arguments, and the prompt's name for messages."""

    prompt_id: str
    data_source: str
    solution_str: str
    ground_truth: str
    extra_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardResult:
    reward: float
    timed_out: bool = False
    """The time limit passed, and the reward is `timeout_reward`."""


class Scorer:
    """A pool of scoring processes. Used from one thread; after an error other than FunctionFailed it is closed.

    Raises UserError when the reward function cannot be loaded.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._name = config.type if config.function is None else config.function
        self.num_timeouts = 0
        """Answers over the time limit since the start."""
        self._workers: list[_Worker] = []
        try:
            self._workers += [_Worker(config) for _ in range(config.num_workers)]
            while any(worker.deadline is not None for worker in self._workers):
                for worker, kind, payload in self._next_messages():
                    self._on_start(worker, kind, payload)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers."""
        while self._workers:
            self._workers.pop().kill()

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Rewards in the order of `requests`.

        Raises FunctionFailed when the function raises, returns no finite number, or ends its process twice on an
        answer.
        """
        assert self._workers, "the scorer is closed"
        results: dict[int, RewardResult] = {}
        waiting = deque(range(len(requests)))
        crashed: set[int] = set()
        try:
            while len(results) < len(requests):
                for worker in self._workers:
                    if worker.deadline is None and waiting:
                        position = waiting.popleft()
                        worker.start(position, requests[position], self._config.timeout_s)
                for worker, kind, payload in self._next_messages():
                    position = worker.position
                    if position is None:
                        self._on_start(worker, kind, payload)
                    elif kind == "crashed" and position not in crashed:
                        crashed.add(position)
                        waiting.appendleft(position)
                        self._replace(worker)
                    else:
                        results[position] = self._on_answer(worker, kind, payload, requests[position])
        except FunctionFailed:
            # A worker in the middle of an answer would give it to the next question.
            for worker in [worker for worker in self._workers if worker.deadline is not None]:
                self._replace(worker)
            raise
        except BaseException:
            self.close()
            raise
        return [results[position] for position in range(len(requests))]

    def _next_messages(self) -> list[tuple[_Worker, str, Any]]:
        """Wait for one working process at least to answer, crash or pass its deadline."""
        working = [(worker, worker.deadline) for worker in self._workers if worker.deadline is not None]
        first_deadline = min(deadline for _, deadline in working)
        readable = wait([worker.connection for worker, _ in working], max(0.0, first_deadline - time.monotonic()))
        messages = []
        for worker, deadline in working:
            kind, payload = worker.receive() if worker.connection in readable else ("working", None)
            # Past the deadline a worker that was not killed in time has ended itself: late, not crashed.
            if kind in ("working", "crashed") and time.monotonic() >= deadline:
                kind = "late"
            if kind != "working":
                messages.append((worker, kind, payload))
        return messages

    def _on_start(self, worker: _Worker, kind: str, payload: Any) -> None:
        match kind:
            case "ready":
                worker.deadline = None
            case "failed":
                raise UserError(payload)
            case "late":
                raise RunError(f"reward function {self._name} was not imported within {START_LIMIT_S:.0f} s")
            case "crashed":
                raise RunError(f"importing reward function {self._name} ended its process ({worker.kill()})")
            case _:
                raise AssertionError(f"a starting worker sent {kind}")

    def _on_answer(self, worker: _Worker, kind: str, payload: Any, request: RewardRequest) -> RewardResult:
        match kind:
            case "reward":
                worker.position = worker.deadline = None
                return RewardResult(payload)
            case "late":
                self.num_timeouts += 1
                self._replace(worker)
                return RewardResult(self._config.timeout_reward, timed_out=True)
            case "failed":
                worker.position = worker.deadline = None
                raise FunctionFailed(
                    f"reward function {self._name} failed on an answer to prompt {request.prompt_id}; mend it and "
                    f"continue with the same command:\n{payload}"
                )
            case "crashed":
                raise FunctionFailed(
                    f"reward function {self._name} ended its process twice ({worker.kill()}) on the same answer to "
                    f"prompt {request.prompt_id}, which starts {request.solution_str[:120]!r}"
                )
            case _:
                raise AssertionError(f"a scoring worker sent {kind}")

    def _replace(self, worker: _Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = _Worker(self._config)


class _Worker:
    """One process with at most one request. Waiting for it is bounded by `deadline`; without one it is idle."""

    def __init__(self, config: RewardConfig) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megatron_bapo.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                # A group of its own: Ctrl-C passes it by, and what the function itself started is killed with it.
                start_new_session=True,
            )
        self.position: int | None = None
        self.deadline: float | None = time.monotonic() + START_LIMIT_S
        self._send(config)

    def start(self, position: int, request: RewardRequest, timeout_s: float) -> None:
        self.position = position
        self.deadline = time.monotonic() + timeout_s
        self._send(
            {
                "data_source": request.data_source,
                "solution_str": request.solution_str,
                "ground_truth": request.ground_truth,
                "extra_info": request.extra_info,
            }
        )

    def receive(self) -> tuple[str, Any]:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            return "crashed", None

    def kill(self) -> str:
        """End the process with all that it started, and say how it ended."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        try:
            code = self._process.wait(KILL_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"scoring process {self._process.pid} did not end within {KILL_LIMIT_S:.0f} s") from error
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def _send(self, message: Any) -> None:
        # A dead process is noticed by `receive`, which tells it from a late one.
        with contextlib.suppress(ConnectionError):
            self.connection.send(message)


def _environment() -> dict[str, str]:
    """This process's environment, with its import path, so that the worker finds the modules that it would find."""
    folders = [folder or os.getcwd() for folder in sys.path]
    path = os.pathsep.join(dict.fromkeys([*folders, os.getcwd()]))
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
