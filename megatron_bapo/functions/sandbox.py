"""Run a Python program that a model wrote, in a sandbox of bubblewrap (https://github.com/containers/bubblewrap).

The program sees the Python environment and the system's libraries, read-only, and an empty /tmp of its own. It has no
network, no capabilities, no other processes, no environment variables of the run, and none of its files. Each of its
processes has limits on CPU time, memory, open files and the size of files. These limits do not hold several processes
together, and they do not protect from errors of the kernel; a reward server in a virtual machine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from megatron_bapo.errors import RunError, UserError

MIB = 1 << 20
MAX_OUTPUT = 16 * MIB
"""Bytes of standard output, and of standard error, after which a program is ended."""
TEMPORARY_BYTES = 64 * MIB
"""Size of the program's /tmp."""
MAX_FILE_BYTES = 16 * MIB
MAX_OPEN_FILES = 64
MAX_PROCESSES = 16
"""Processes and threads. Linux does not apply this limit to programs of root."""
CHECK_LIMIT_S = 60.0
PROGRAM_PATH = "/program.py"
"""Path of the model's program in the sandbox, for callers that give it one."""
OTHERWISE = "or run programs in a server of yours (reward.type=remote, or a function)"
INSTALL = f"install bubblewrap 0.8 or newer, {OTHERWISE}"
ALLOW = (
    "it needs bubblewrap 0.8 or newer and unprivileged user namespaces: allow them (sysctl "
    "kernel.unprivileged_userns_clone=1, on Ubuntu 24.04 kernel.apparmor_restrict_unprivileged_userns=0, in Docker "
    f"--security-opt seccomp=unconfined), {OTHERWISE}"
)


@dataclass(frozen=True)
class Limits:
    """Limits of each process of a program."""

    cpu_s: float
    """CPU seconds, rounded up to whole ones."""
    memory_gib: float
    """Address space in GiB."""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    status: int | None
    """Exit status, 128 + N after signal N; None if it was ended because of its output."""
    stdout: bytes
    stderr: bytes


async def run_program(
    arguments: Sequence[str], files: Mapping[str, bytes], limits: Limits, stdin: bytes = b""
) -> Ended:
    """Run Python with `arguments` in a sandbox with `files`, which are absolute paths and their contents.

    Ends the program with all its processes when it is cancelled. Raises RunError if the sandbox cannot be made.
    """
    status_read, status_write = os.pipe()
    with open(status_read, "rb") as reports:
        with ExitStack() as given:
            given.callback(os.close, status_write)
            sources = {given.enter_context(_memory_file(content)): path for path, content in files.items()}
            process = await asyncio.create_subprocess_exec(
                *python_command(("--json-status-fd", str(status_write), *_bound(sources)), limits),
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=(status_write, *sources),
            )
        stdout, stderr = await _communicate(process, stdin)
        status = _exit_code(reports.read())
    if max(len(stdout), len(stderr)) > MAX_OUTPUT:
        return Ended(None, stdout, stderr)
    if status is None:
        raise RunError(f"the sandbox could not be made: {_last_words(stderr)}; {ALLOW}")
    return Ended(status, stdout, stderr)


def sandbox_problem() -> str | None:
    """Run an empty program. Return why this machine cannot run programs, and what to do; None if it can."""
    try:
        command = [*python_command((), Limits(CHECK_LIMIT_S, 1.0)), "-c", ""]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_LIMIT_S)
    except RunError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"an empty program did not end in the sandbox within {CHECK_LIMIT_S:g} s"
    if ended.returncode == 0:
        return None
    return f"an empty program failed in the sandbox: {_last_words(ended.stderr)}; {ALLOW}"


def check_sandbox() -> None:
    """Raise UserError if this machine cannot run programs."""
    if (problem := sandbox_problem()) is not None:
        raise UserError(problem)


def python_command(options: Iterable[str], limits: Limits) -> Iterator[str]:
    """Yield the command of Python in a sandbox, without Python's arguments. Raises RunError if there is no bwrap."""
    if (bwrap := shutil.which("bwrap")) is None:
        raise RunError(f"the sandbox needs bwrap, which is not in PATH; {INSTALL}")
    yield from (bwrap, *_isolation(), *options, "--remount-ro", "/", "--")
    yield from _limited(limits)
    yield from (sys.executable, "-s", "-P", "-B", "-X", "utf8")


def _bound(sources: Mapping[int, str]) -> Iterator[str]:
    """Yield bwrap's options for files with the content of descriptors."""
    for descriptor, path in sources.items():
        yield from ("--ro-bind-data", str(descriptor), path)


def _isolation() -> Iterator[str]:
    """Yield bwrap's options for a root file system with Python alone, in namespaces of its own."""
    yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL")
    yield from ("--die-with-parent", "--new-session", "--clearenv")
    variables = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONHASHSEED": "0"}
    variables |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    for name, value in variables.items():
        yield from ("--setenv", name, value)
    # Python may be in /tmp itself, where its folder is then mounted.
    yield from ("--size", str(TEMPORARY_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp")
    for folder in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(folder):
            yield from ("--symlink", os.readlink(folder), folder)
        elif os.path.isdir(folder):
            yield from ("--ro-bind", folder, folder)
    for folder in dict.fromkeys(("/usr", sys.base_prefix, sys.prefix)):
        yield from ("--ro-bind", folder, folder)
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        yield from ("--ro-bind-try", path, path)
    yield from ("--dev", "/dev", "--remount-ro", "/dev")


def _limited(limits: Limits) -> Iterator[str]:
    cpu_s, memory = math.ceil(limits.cpu_s), round(limits.memory_gib * (1 << 30))
    yield from ("prlimit", f"--cpu={cpu_s}:{cpu_s + 1}", f"--as={memory}", f"--nproc={MAX_PROCESSES}")
    yield from (f"--fsize={MAX_FILE_BYTES}", f"--nofile={MAX_OPEN_FILES}", "--core=0", "--")


async def _communicate(process: asyncio.subprocess.Process, stdin: bytes) -> tuple[bytes, bytes]:
    """Return the outputs when the process has ended. Ends it when one of them exceeds MAX_OUTPUT, and on errors."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    feeding = asyncio.create_task(_feed(process.stdin, stdin))
    reading = [asyncio.create_task(_read(process, pipe)) for pipe in (process.stdout, process.stderr)]
    try:
        stdout, stderr = await asyncio.gather(*reading)
        await process.wait()
    finally:
        for task in (feeding, *reading):
            task.cancel()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return stdout, stderr


async def _feed(pipe: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read its input
        pipe.write(content)
        await pipe.drain()
    pipe.close()


async def _read(process: asyncio.subprocess.Process, pipe: asyncio.StreamReader) -> bytes:
    """Return the output, or more than MAX_OUTPUT bytes of it after ending the process."""
    parts, num = [], 0
    while num <= MAX_OUTPUT and (part := await pipe.read(1 << 16)):
        parts.append(part)
        num += len(part)
    if num > MAX_OUTPUT:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return b"".join(parts)


def _exit_code(report: bytes) -> int | None:
    """Return the exit code from the objects that bwrap writes; None if no program has run."""
    objects = [json.loads(line) for line in report.splitlines()]
    return next((each["exit-code"] for each in objects if "exit-code" in each), None)


def _last_words(stderr: bytes) -> str:
    return stderr[-500:].decode(errors="replace").strip()


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    """Yield a descriptor of a file in memory, at its start."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
