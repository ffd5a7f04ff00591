"""The process that runs a function: `python -m megatron_bapo.functions.worker FILE_DESCRIPTOR`, started by the pool.

A program of its own rather than a multiprocessing child, which would import the parent's main module, Torch and Ray
included. It reads the target, answers `ready`, then reads calls: a line of JSON each. A plain function runs one call at
a time in the main thread, a coroutine function as many as arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from megatron_bapo.errors import RunError, UserError
from megatron_bapo.functions.user_function import Target, checked, load

START_LIMIT_S = 300.0
LINE_LIMIT = 1 << 30
"""Bytes."""
ORPHAN_GRACE_S = 2.0
TRACE_LINES = 6


@contextlib.contextmanager
def ended_after(limit_s: float) -> Iterator[None]:
    """Bound a computation also when the parent, which kills late workers, is gone: the kernel ends this process."""
    signal.setitimer(signal.ITIMER_REAL, limit_s + ORPHAN_GRACE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def serve(connection: socket.socket) -> None:
    """Run calls until the parent has closed its end."""
    with connection.makefile("rb") as lines:
        target = Target(**json.loads(lines.readline()))
        try:
            with ended_after(START_LIMIT_S):
                function, is_async = load(target)
        except UserError as error:
            _send(connection, {"kind": "failed", "message": str(error)})
            return
        _send(connection, {"kind": "ready", "concurrent": is_async})
        if not is_async:
            for line in lines:
                _send(connection, _answer(target, function, json.loads(line)))
            return
    asyncio.run(_serve_many(connection, target, function))


def _answer(target: Target, function: Callable[..., Any], call: dict[str, Any]) -> dict[str, Any]:
    try:
        with ended_after(call["limit_s"]):
            result = function(**call["arguments"])
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        return {"number": call["number"], "kind": "result", "value": checked(target, result)}
    except Exception as error:  # The user's code: everything it raises is reported with its place.
        return {"number": call["number"], **_failure(error)}


async def _serve_many(connection: socket.socket, target: Target, function: Callable[..., Any]) -> None:
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_LIMIT)
    running: set[asyncio.Task[None]] = set()

    async def answer(call: dict[str, Any]) -> None:
        reply: dict[str, Any]
        limit = asyncio.timeout(call["limit_s"])
        try:
            async with limit:
                reply = {"kind": "result", "value": checked(target, await function(**call["arguments"]))}
        except Exception as error:  # The user's code, as above.
            reply = {"kind": "late"} if limit.expired() else _failure(error)
        writer.write(_line({"number": call["number"], **reply}))

    def ended(task: asyncio.Task[None]) -> None:
        running.discard(task)
        if not running:
            signal.setitimer(signal.ITIMER_REAL, 0)

    while line := await reader.readline():
        call = json.loads(line)
        # A coroutine that blocks the loop beyond every limit.
        signal.setitimer(signal.ITIMER_REAL, call["limit_s"] + ORPHAN_GRACE_S)
        task = asyncio.create_task(answer(call))
        running.add(task)
        task.add_done_callback(ended)
    os._exit(0)  # nobody waits for what still runs


def _failure(error: Exception) -> dict[str, Any]:
    trace = "\n".join(traceback.format_exc().splitlines()[-TRACE_LINES:])
    return {"kind": "failed", "message": str(error) if isinstance(error, RunError) else trace}


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(_line(message))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file_descriptor = int(sys.argv[1])
    os.set_inheritable(file_descriptor, False)
    with contextlib.suppress(ConnectionError), socket.socket(fileno=file_descriptor) as connection:
        serve(connection)
