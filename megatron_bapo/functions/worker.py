"""Worker process of a function, started by the pool: `python -m megatron_bapo.functions.worker FILE_DESCRIPTOR`.

It is a separate program and not a multiprocessing child, which would import the parent's main module with Torch and
Ray. The protocol has one line of JSON per message: the worker reads the target, replies `ready` with the arguments that
the function takes, and then reads calls. A plain function runs one call at a time in the main thread, a coroutine
function all calls concurrently.

The program forks: the worker is the child process of a supervisor, which ends it with all processes that it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from typing import Any

from megatron_bapo.errors import RunError, UserError
from megatron_bapo.event_loop import answered_within
from megatron_bapo.functions.supervisor import supervise
from megatron_bapo.functions.user_function import LoadedFunction, Target, checked, load

START_LIMIT_S = 300.0
LINE_LIMIT = 1 << 30
"""Maximum length of a line in bytes."""
TRACE_LINES = 6


def serve(connection: socket.socket) -> None:
    """Execute calls until the parent closes the connection."""
    with connection.makefile("rb") as lines:
        target = Target(**json.loads(lines.readline()))
        _limit_memory(target)
        try:
            function = load(target)
        except UserError as error:
            is_memory = isinstance(error.__cause__, MemoryError) and target.memory_gib is not None
            message = f"{error}\n{target.memory_advice}" if is_memory else str(error)
            _send(connection, {"kind": "failed", "message": message})
            return
        _send(connection, {"kind": "ready", "concurrent": function.is_async, "arguments": function.arguments})
        if not function.is_async:
            for line in lines:
                _send(connection, _execute(target, function, json.loads(line)))
            return
    asyncio.run(_serve_many(connection, target, function))


def _limit_memory(target: Target) -> None:
    """Limit the memory that this process and each process it starts can write, without what they only reserve."""
    if target.memory_gib is not None:
        num_bytes = round(target.memory_gib * 2**30)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            num_bytes = min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))


def _execute(target: Target, function: LoadedFunction, call: dict[str, Any]) -> dict[str, Any]:
    start_s = time.monotonic()
    try:
        result = function.call(**call["arguments"])
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        reply = {"kind": "result", "value": checked(target, result)}
    except Exception as error:  # The user's code may raise anything, which is reported with its traceback.
        reply = _failure(error, target)
    if time.monotonic() - start_s > call["limit_s"]:
        reply = {"kind": "late"}  # Whether the pool's own timeout has passed depends on when it reads the reply.
    return {"number": call["number"], **reply}


async def _serve_many(connection: socket.socket, target: Target, function: LoadedFunction) -> None:
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT)
    running: set[asyncio.Task[None]] = set()

    async def execute(call: dict[str, Any]) -> None:
        reply: dict[str, Any]
        limit: asyncio.Timeout | None = None
        try:
            async with answered_within(call["limit_s"]) as limit:
                reply = {"kind": "result", "value": checked(target, await function.call(**call["arguments"]))}
        except (Exception, asyncio.CancelledError) as error:  # The user's code may raise anything.
            reply = {"kind": "late"} if limit is not None and limit.expired() else _failure(error, target)
        writer.write(_line({"number": call["number"], **reply}))

    while line := await reader.readline():
        task = asyncio.create_task(execute(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    os._exit(0)  # nothing waits for the remaining calls


def _failure(error: BaseException, target: Target) -> dict[str, Any]:
    trace = "\n".join(traceback.format_exc().splitlines()[-TRACE_LINES:])
    if isinstance(error, MemoryError) and target.memory_gib is not None:
        return {"kind": "memory", "message": trace}
    return {"kind": "failed", "message": str(error) if isinstance(error, RunError) else trace}


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(_line(message))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file_descriptor = int(sys.argv[1])
    supervise(file_descriptor)
    os.set_inheritable(file_descriptor, False)
    with contextlib.suppress(ConnectionError), socket.socket(fileno=file_descriptor) as connection:
        serve(connection)
