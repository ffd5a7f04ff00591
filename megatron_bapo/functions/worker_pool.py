"""Run a function in worker processes that can be killed, because it may hang or crash.

A process runs one call of a plain function at a time, or `concurrency` calls of a coroutine function. A call is retried
once, alone in a new process, if its process ended or ran out of memory during the call, or if it timed out and
concurrent calls may be the cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from megatron_bapo.errors import FunctionFailed, RunError, UserError
from megatron_bapo.event_loop import answered_within
from megatron_bapo.functions.user_function import Target
from megatron_bapo.functions.worker import LINE_LIMIT, START_LIMIT_S
from megatron_bapo.text import without_lone_surrogates

KILL_LIMIT_S = 30.0
RAY_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Environment variables with Ray's token, which would allow a function to run code in the run's Ray cluster."""
REPLY_GRACE_S = 1.0
"""Time that a reply may take beyond the call's time limit, which the worker measures."""


@dataclass(frozen=True)
class Result:
    value: Any
    timed_out: bool = False
    """True if the call timed out; it then has no value."""


class FunctionPool:
    """Pool of `num_workers` processes that serve calls in order. It must be used from one event loop."""

    def __init__(self, target: Target, *, num_workers: int, concurrency: int, timeout_s: float) -> None:
        """Start the processes. `timeout_s` applies to each call. Raises UserError if the function cannot be loaded."""
        self._target = target
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._workers: set[_Worker] = set()
        self._slots: asyncio.Queue[_Worker | None] = asyncio.Queue()
        """One entry per free call slot; None wakes waiting callers after a process could not be replaced."""
        self._ending: set[_Worker] = set()
        self._alone = asyncio.Semaphore(num_workers)
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that wait for the end of workers and start others in their place."""
        self._failure: Exception | None = None
        try:
            for _ in range(num_workers):
                self._workers.add(_Worker(target))
            for worker in self._workers:
                self._begin(worker)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the processes."""
        for task in self._tasks:
            task.cancel()
        workers = self._workers | self._ending
        self._workers.clear()
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait_until_ended()

    async def call(self, arguments: dict[str, Any], subject: str) -> Result:
        """Return the function's result or that it timed out.

        Raises FunctionFailed, which names `subject`, if the function raises, returns a wrong type, or runs out of
        memory or ends its process twice.
        """
        worker = await self._slot()
        try:
            reply = await worker.call(arguments, self._timeout_s)
        except asyncio.CancelledError:
            if not worker.is_concurrent:
                self._replace(worker)  # it is still busy with the cancelled call
            raise
        finally:
            self._slots.put_nowait(worker)
        if reply["kind"] in ("died", "memory", "hangs"):
            self._replace(worker)
        if reply["kind"] in ("died", "memory") or (reply["kind"] == "hangs" and worker.is_concurrent):
            reply = await self._call_alone(arguments)
        match reply["kind"]:
            case "result":
                return Result(reply["value"])
            case "late" | "hangs":
                return Result(None, timed_out=True)
            case "failed":
                raise FunctionFailed(
                    f"{self._target.name} failed on {subject}; fix it and continue with the same command:\n"
                    f"{reply['message']}"
                )
            case "memory":
                raise FunctionFailed(
                    f"{self._target.name} ran out of memory on {subject}; {self._target.memory_advice}:\n"
                    f"{reply['message']}"
                )
            case "died":
                raise FunctionFailed(f"{self._target.name} ended its process twice ({reply['how']}) on {subject}")
            case kind:
                raise AssertionError(f"a worker sent {kind}")

    async def _slot(self) -> _Worker:
        while True:
            worker = await self._slots.get()
            if self._failure is not None:
                self._slots.put_nowait(None)
                raise self._failure
            if worker in self._workers and worker is not None:
                if worker.is_alive:
                    return worker
                self._replace(worker)

    async def _call_alone(self, arguments: dict[str, Any]) -> dict[str, Any]:
        async with self._alone:
            worker = _Worker(self._target)
            self._workers.add(worker)
            try:
                await asyncio.to_thread(worker.wait_until_ready)
                return await worker.call(arguments, self._timeout_s)
            finally:
                self._kill(worker)
                self._spawn(self._wait_until_ended(worker))

    def _begin(self, worker: _Worker) -> None:
        worker.wait_until_ready()
        self._open(worker)

    def _open(self, worker: _Worker) -> None:
        for _ in range(self._concurrency if worker.is_concurrent else 1):
            self._slots.put_nowait(worker)

    def _replace(self, worker: _Worker) -> None:
        """Kill the worker and start another one in its place; do nothing if it is replaced already."""
        if worker not in self._workers:
            return
        self._kill(worker)

        async def begin() -> None:
            await self._wait_until_ended(worker)
            try:
                another = _Worker(self._target)
                self._workers.add(another)
                await asyncio.to_thread(another.wait_until_ready)
                self._open(another)
            except (RunError, UserError) as error:
                self._fail(error)

        self._spawn(begin())

    def _kill(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        self._ending.add(worker)
        worker.kill()

    async def _wait_until_ended(self, worker: _Worker) -> None:
        try:
            await asyncio.to_thread(worker.wait_until_ended)
        except RunError as error:
            self._fail(error)
        self._ending.discard(worker)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._slots.put_nowait(None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Worker:
    """One worker process and its supervisor."""

    def __init__(self, target: Target) -> None:
        """Start the process. Raises RunError if the system refuses another one."""
        self._target = target
        try:
            # When this process ends, however it does, the pipe closes and the supervisor kills the worker.
            self._process, self._socket = start_process(
                "megatron_bapo.functions.worker", stdin=subprocess.PIPE, withheld=target.withheld
            )
        except OSError as error:
            raise RunError(f"no worker process for {target.name} could be started: {error}") from error
        self.is_concurrent = False
        self._arguments = frozenset[str]()
        """Arguments that the function takes; others are not sent, because a response may have a megabyte."""
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._streams: asyncio.Task[asyncio.StreamWriter] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until the function is loaded.

        Raises UserError if it cannot be loaded, RunError if loading times out or ends the process.
        """
        name = self._target.name
        self._socket.settimeout(START_LIMIT_S)
        try:
            with contextlib.suppress(ConnectionError):
                self._socket.sendall(_line(asdict(self._target)))
            with self._socket.makefile("rb") as lines:
                line = lines.readline()
        except TimeoutError:
            raise RunError(f"{name} was not imported within {START_LIMIT_S:.0f} s") from None
        except ConnectionError:
            line = b""
        if not line:
            self.kill()
            raise RunError(f"importing {name} ended its process ({self.wait_until_ended()})")
        message = _parse(line)
        if message["kind"] == "failed":
            raise UserError(message["message"])
        self.is_concurrent, self._arguments = message["concurrent"], frozenset(message["arguments"])

    async def call(self, arguments: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the worker's reply, or a reply of kind `died` or `hangs`."""
        writer = await self._connected()
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        taken = {name: value for name, value in arguments.items() if name in self._arguments}
        self._pending[number] = reply
        try:
            async with answered_within(limit_s + REPLY_GRACE_S):
                with contextlib.suppress(ConnectionError):
                    writer.write(_line({"number": number, "limit_s": limit_s, "arguments": taken}))
                    await writer.drain()
                return await reply
        except TimeoutError:
            return {"kind": "hangs"}
        finally:
            del self._pending[number]

    async def _connected(self) -> asyncio.StreamWriter:
        if self._streams is None:
            self._streams = asyncio.get_running_loop().create_task(self._connect())
        return await asyncio.shield(self._streams)

    async def _connect(self) -> asyncio.StreamWriter:
        self._socket.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=LINE_LIMIT)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Pass replies to their callers until the process ends, then report its end to all pending callers."""
        with contextlib.suppress(ConnectionError):
            while (line := await reader.readline()).endswith(b"\n"):
                reply = _parse(line)
                self._deliver([reply["number"]], reply)
        self.kill()
        how = await asyncio.to_thread(self.wait_until_ended)
        self._deliver([*self._pending], {"kind": "died", "how": how})

    def _deliver(self, numbers: Sequence[int], reply: dict[str, Any]) -> None:
        for number in numbers:
            pending = self._pending.get(number)
            if pending is not None and not pending.done():
                pending.set_result(reply)

    def kill(self) -> None:
        """Make the supervisor kill the process and all processes that it has started, without waiting for that."""
        self._process.terminate()
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()

    def wait_until_ended(self) -> str:
        """Wait until a killed process has ended, and return how it ended; raises RunError if it does not end."""
        try:
            code = self._process.wait(KILL_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            raise RunError(f"process {self._process.pid} did not end within {KILL_LIMIT_S:.0f} s") from error
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return how if self._target.memory_gib is None else f"{how}; {self._target.memory_limit}"


def _parse(line: bytes) -> dict[str, Any]:
    """Return the message of a worker; lone surrogates in its strings, which the function may return, are replaced."""
    message = json.loads(line)
    return _without_surrogates(message) if b"\\ud" in line else message


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return without_lone_surrogates(value)
        case list():
            return [_without_surrogates(item) for item in value]
        case dict():
            return {key: _without_surrogates(item) for key, item in value.items()}
    return value


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def start_process(
    module: str, *, stdin: int = subprocess.DEVNULL, withheld: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module FILE_DESCRIPTOR`; return it and the other end of the socket that it finds there.

    The socket closes when this process ends, however that ends. The process does not get the variables `withheld`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=stdin,
            env=_environment(withheld),
            start_new_session=True,  # In its own process group it does not receive Ctrl-C.
        )
    return process, ours


def _environment(withheld: Sequence[str]) -> dict[str, str]:
    """Return this process's environment, with its import path and without secrets."""
    folders = [folder or os.getcwd() for folder in sys.path]
    path = os.pathsep.join(dict.fromkeys([*folders, os.getcwd()]))
    kept = {name: value for name, value in os.environ.items() if name not in (*RAY_TOKEN, *withheld)}
    return {"OMP_NUM_THREADS": "1"} | kept | {"PYTHONPATH": path}
