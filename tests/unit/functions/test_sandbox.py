"""What a program in the sandbox can see and use, with real bubblewrap."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from megatron_bapo.errors import RunError, UserError
from megatron_bapo.functions import sandbox
from megatron_bapo.functions.sandbox import (
    MAX_OUTPUT,
    MAX_PROCESSES,
    Ended,
    Limits,
    check_sandbox,
    python_command,
    run_program,
    sandbox_problem,
)
from tests.sandboxes import needs_sandbox

LIMITS = Limits(cpu_s=20.0, memory_gib=1.0)
SIGXCPU = 128 + 24


def run(program: str, stdin: bytes = b"", limits: Limits = LIMITS) -> Ended:
    return asyncio.run(run_program(["/program.py"], {"/program.py": program.encode()}, limits, stdin))


def result_of(program: str) -> object:
    """Return the JSON that the program prints."""
    ended = run(program)
    assert ended.status == 0, ended.stderr.decode()
    return json.loads(ended.stdout)


def error_of(statement: str) -> str:
    """Return the name of the OSError that a statement raises; empty if it raises none."""
    program = f"import os, socket\ntry:\n    {statement}\nexcept OSError as error:\n    print(type(error).__name__)"
    return run(program).stdout.decode().strip()


@needs_sandbox
def test_a_program_reads_its_input_and_its_status_and_outputs_are_returned() -> None:
    ended = run("import sys\nprint(sys.stdin.read().upper())\nprint('e', file=sys.stderr)\nsys.exit(3)", b"abc")
    assert ended == Ended(3, b"ABC\n", b"e\n")


@needs_sandbox
def test_a_program_that_does_not_read_a_long_input_ends() -> None:
    assert run("print(1)", b"x" * (1 << 22)) == Ended(0, b"1\n", b"")


@needs_sandbox
def test_a_program_uses_the_packages_of_the_environment() -> None:
    assert run("import numpy\nprint(numpy.arange(4).sum())").stdout == b"6\n"


@needs_sandbox
def test_a_program_sees_no_files_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for path in (tmp_path / "secret", Path("/etc/passwd"), Path("/proc/self/environ"), Path.home() / ".ssh"):
        assert error_of(f"os.stat({str(path)!r})") == "FileNotFoundError"


@needs_sandbox
def test_a_program_writes_only_into_its_own_small_tmp(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for path in ("/new", "/dev/shm/new", "/program.py", f"{sys.prefix}/new", "/usr/new"):
        assert error_of(f"open({path!r}, 'w')") == "OSError"
    assert error_of(f"open({str(marker)!r}, 'w')") == "FileNotFoundError"
    assert error_of("open('file', 'w').write('x')") == ""
    filled = "[open(str(i), 'wb').write(bytes(8 << 20)) for i in range(9)]"
    assert "No space left on device" in run(filled).stderr.decode()


@needs_sandbox
def test_a_program_has_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert error_of(f"socket.create_connection(('127.0.0.1', {port}), 5)") == "ConnectionRefusedError"
    assert error_of("socket.create_connection(('192.0.2.1', 80), 5)") == "OSError"


@needs_sandbox
def test_a_program_gets_no_variables_and_no_open_files_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_AUTHORIZATION", "secret")
    assert "REWARD_AUTHORIZATION" not in str(result_of("import json, os\nprint(json.dumps(dict(os.environ)))"))
    opened = """
import json, os
found = []
for number in range(3, 64):
    try:
        os.fstat(number)
        found.append(number)
    except OSError:
        pass
print(json.dumps(found))
"""
    assert result_of(opened) == []


@needs_sandbox
def test_a_program_has_no_rights_that_a_user_namespace_gives() -> None:
    # The flags are CLONE_NEWUSER and CLONE_NEWNS.
    program = """
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
calls = [libc.unshare(0x10000000), libc.unshare(0x00020000), libc.mount(b"a", b"/tmp", b"tmpfs", 0, None)]
print(json.dumps(calls))
"""
    assert result_of(program) == [-1, -1, -1]


@needs_sandbox
def test_hashes_of_texts_are_the_same_in_every_run() -> None:
    program = "import json\nprint(json.dumps(hash('text')))"
    assert result_of(program) == result_of(program)


@needs_sandbox
def test_limits_end_a_program() -> None:
    assert run("while True: pass", limits=Limits(0.5, 1.0)).status == SIGXCPU
    assert b"MemoryError" in run("bytearray(200 << 20)", limits=Limits(20.0, 0.15)).stderr
    assert b"File too large" in run("open('f', 'wb').write(bytes(20 << 20))").stderr


@needs_sandbox
def test_the_number_of_processes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux does not limit root's processes, and other users cannot read root's environment."""
    identity = {}
    if os.geteuid() == 0:
        identity = {"user": 65534, "group": 65534, "extra_groups": []}
        for name, path in {"executable": "/usr/bin/python3", "prefix": "/usr", "base_prefix": "/usr"}.items():
            monkeypatch.setattr(sys, name, path)
    program = """
import os, time
for number in range(100):
    if os.fork() == 0:
        time.sleep(60)
    print(number, flush=True)
"""
    command = [*python_command((), LIMITS), "-c", program]
    ended = subprocess.run(command, capture_output=True, timeout=120, cwd="/", **identity)
    assert b"BlockingIOError" in ended.stderr
    assert 2 < len(ended.stdout.splitlines()) < MAX_PROCESSES


@needs_sandbox
@pytest.mark.parametrize("output", ["stdout", "stderr"])
def test_a_program_with_too_much_output_is_ended(output: str) -> None:
    ended = run(f"import sys\nwhile True: sys.{output}.write('x' * 1000)")
    assert ended.status is None
    assert len(getattr(ended, output)) > MAX_OUTPUT


@needs_sandbox
def test_a_cancelled_program_ends_with_its_processes() -> None:
    # Sessions of their own do not help them.
    program = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: os.setsid()\ntime.sleep(1000.25)"
    path = f"/{uuid4()}.py"  # the machine may run this test twice

    def running() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if path in (each.info["cmdline"] or ())]

    def wait_for(is_right: Callable[[int], bool]) -> None:
        deadline = time.monotonic() + 60.0
        while not is_right(len(running())):
            assert time.monotonic() < deadline
            time.sleep(0.05)

    async def main() -> None:
        task = asyncio.create_task(run_program([path], {path: program.encode()}, LIMITS))
        await asyncio.to_thread(wait_for, lambda num: num >= 8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(wait_for, lambda num: num == 0)
        await asyncio.sleep(0.2)  # the event loop closes the pipes of the ended program

    asyncio.run(main())


@needs_sandbox
def test_a_machine_that_allows_no_namespaces_is_refused_with_a_way_out() -> None:
    """The machine is a sandbox itself, in which no further ones can be made."""
    root = Path(sandbox.__file__).parents[2]
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(root)!r})
from megatron_bapo.functions.sandbox import Limits, run_program, sandbox_problem
print(sandbox_problem())
asyncio.run(run_program(["-c", ""], {{}}, Limits(1.0, 1.0)))
"""
    command = ["bwrap", "--unshare-user", "--disable-userns", "--ro-bind", "/", "/", "--dev", "/dev"]
    ended = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "allow them (sysctl kernel.unprivileged_userns_clone=1" in ended.stdout
    assert "RunError: the sandbox could not be made: bwrap: " in ended.stderr


def test_a_machine_without_bubblewrap_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(sandbox_problem()).startswith("the sandbox needs bwrap, which is not in PATH; install bubblewrap 0.8")
    with pytest.raises(UserError, match="not in PATH"):
        check_sandbox()
    with pytest.raises(RunError, match="not in PATH"):
        run("print(1)")


@needs_sandbox
def test_python_may_be_in_the_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
        monkeypatch.setattr(sys, "executable", f"{folder}/bin/python")
        monkeypatch.setattr(sys, "prefix", folder)
        assert run("import sys\nprint(sys.prefix)").stdout.decode().strip() == folder
