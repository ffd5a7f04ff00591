"""Runs a function in processes that can be killed, because it may hang, crash or never end.

A process runs one call of a plain function at a time, of a coroutine function `concurrency`. A call whose process ends
under it, or that is late where other calls may be to blame, is run once more, alone in a process of its own.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from megatron_bapo.errors import FunctionFailed, RunError, UserError
from megatron_bapo.functions.user_function import Target
from megatron_bapo.functions.worker import LINE_LIMIT, START_LIMIT_S

KILL_LIMIT_S = 10.0
RAY_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Whoever has it runs what he likes in the run's Ray cluster."""
CANCEL_GRACE_S = 1.0
"""In which a coroutine that is late has to let go."""


@dataclass(frozen=True)
class Result:
    value: Any
    timed_out: bool = False
    """The time limit passed; there is no value."""


class FunctionPool:
    """`num_workers` processes, started at once; calls are dealt to them in their order. Used from one event loop."""

    def __init__(self, target: Target, *, num_workers: int, concurrency: int, timeout_s: float) -> None:
        """`timeout_s` is of each call. Raises UserError when the function cannot be loaded."""
        self._target = target
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._workers: set[_Worker] = set()
        self._slots: asyncio.Queue[_Worker | None] = asyncio.Queue()
        """A place for one call each; None wakes who waits when a process could not be replaced."""
        self._alone = asyncio.Semaphore(num_workers)
        self._replacing: set[asyncio.Task[None]] = set()
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
        for task in self._replacing:
            task.cancel()
        while self._workers:
            self._workers.pop().kill()

    async def call(self, arguments: dict[str, Any], subject: str) -> Result:
        """The function's result, or that it was late.

        Raises FunctionFailed, which names `subject`, when it raises, returns nonsense or ends its process twice.
        """
        worker = await self._slot()
        try:
            reply = await worker.call(arguments, self._timeout_s)
        except asyncio.CancelledError:
            if not worker.is_concurrent:
                self._replace(worker)  # it is busy with what nobody waits for
            raise
        finally:
            self._slots.put_nowait(worker)
        if reply["kind"] in ("died", "hangs"):
            self._replace(worker)
        if reply["kind"] == "died" or (reply["kind"] == "hangs" and worker.is_concurrent):
            reply = await self._call_alone(arguments)
        match reply["kind"]:
            case "result":
                return Result(reply["value"])
            case "late" | "hangs":
                return Result(None, timed_out=True)
            case "failed":
                raise FunctionFailed(
                    f"{self._target.name} failed on {subject}; mend it and continue with the same command:\n"
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
                self._workers.discard(worker)
                worker.kill()

    def _begin(self, worker: _Worker) -> None:
        worker.wait_until_ready()
        self._open(worker)

    def _open(self, worker: _Worker) -> None:
        for _ in range(self._concurrency if worker.is_concurrent else 1):
            self._slots.put_nowait(worker)

    def _replace(self, worker: _Worker) -> None:
        """Kill it, if that is not done yet, and have another one take its place."""
        if worker not in self._workers:
            return
        self._workers.discard(worker)
        worker.kill()
        another = _Worker(self._target)
        self._workers.add(another)

        async def begin() -> None:
            try:
                await asyncio.to_thread(another.wait_until_ready)
                self._open(another)
            except (RunError, UserError) as error:
                self._failure = error
                self._slots.put_nowait(None)

        task = asyncio.get_running_loop().create_task(begin())
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)


class _Worker:
    """One process."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megatron_bapo.functions.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(target.withheld),
                # A group of its own: Ctrl-C passes it by, and what the function itself started is killed with it.
                start_new_session=True,
            )
        self.is_concurrent = False
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._streams: asyncio.Task[asyncio.StreamWriter] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Raises UserError when the function cannot be loaded, RunError when that does not end well."""
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
            raise RunError(f"importing {name} ended its process ({self.kill()})")
        message = json.loads(line)
        if message["kind"] == "failed":
            raise UserError(message["message"])
        self.is_concurrent = message["concurrent"]

    async def call(self, arguments: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """What the process says, or that it has `died` or `hangs`."""
        writer = await self._connected()
        number, answered = next(self._numbers), asyncio.get_running_loop().create_future()
        self._pending[number] = answered
        grace_s = CANCEL_GRACE_S if self.is_concurrent else 0.0
        try:
            async with asyncio.timeout(limit_s + grace_s):
                with contextlib.suppress(ConnectionError):
                    writer.write(_line({"number": number, "limit_s": limit_s, "arguments": arguments}))
                    await writer.drain()
                return await answered
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
        """Hand out replies until the process ends, and then tell every caller that is left."""
        with contextlib.suppress(ConnectionError):
            while (line := await reader.readline()).endswith(b"\n"):
                reply = json.loads(line)
                self._answer([reply["number"]], reply)
        how = self.kill()
        self._answer([*self._pending], {"kind": "died", "how": how})

    def _answer(self, numbers: Sequence[int], reply: dict[str, Any]) -> None:
        for number in numbers:
            answered = self._pending.get(number)
            if answered is not None and not answered.done():
                answered.set_result(reply)

    def kill(self) -> str:
        """End the process with all that it started, and say how it ended; whoever waits for it is told."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()
        try:
            code = self._process.wait(KILL_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"process {self._process.pid} did not end within {KILL_LIMIT_S:.0f} s") from error
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        self._answer([*self._pending], {"kind": "died", "how": how})
        return how


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _environment(withheld: Sequence[str]) -> dict[str, str]:
    """This process's, with its import path, so that the worker finds the modules that it would find.

    Without secrets that are not for the function.
    """
    folders = [folder or os.getcwd() for folder in sys.path]
    path = os.pathsep.join(dict.fromkeys([*folders, os.getcwd()]))
    kept = {name: value for name, value in os.environ.items() if name not in (*RAY_TOKEN, *withheld)}
    return {"OMP_NUM_THREADS": "1"} | kept | {"PYTHONPATH": path}
