import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_bapo.errors import FunctionFailed, RunError, UserError
from megatron_bapo.functions.user_function import Target
from megatron_bapo.functions.worker_pool import FunctionPool, Result
from tests.processes import command_line, is_running

RIGHT = Result({"score": 1.0, "pred": None})

# What the answer says is what the function does.
MODULE = r"""
import asyncio, ctypes, os, subprocess, sys, time
from pathlib import Path

def escape(pid_file):
    # A daemon: two forks, a session of its own, an empty environment.
    program = (
        "import os, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        f"open('{pid_file}', 'a').write(f'{{os.getpid()}}\\n')\n"
        "time.sleep(120)\n"
    )
    num = num_lines(pid_file)
    subprocess.run([sys.executable, "-S", "-c", program], env={}, check=True)
    while num_lines(pid_file) == num:
        time.sleep(0.01)

def num_lines(path):
    return path.read_text().count("\n") if path.exists() else 0

kept = []

def obey(answer):
    command, _, argument = answer.partition(" ")
    if command == "sleep":
        time.sleep(float(argument))
    if command == "hang_with_child":
        child = subprocess.Popen(["sleep", "60"])
        Path(argument).write_text(str(child.pid))
        time.sleep(60)
    if command in ("escape", "escape_and_hang", "escape_and_exit"):
        escape(Path(argument))
        if command == "escape_and_hang":
            time.sleep(60)
        if command == "escape_and_exit":
            os._exit(1)
    if command == "allocate":
        return float(len(bytearray(int(argument) << 20)) == int(argument) << 20)
    if command == "leak":
        kept.append(bytearray(int(argument) << 20))
        return 1.0
    if command == "abort_without_memory":
        try:
            bytearray(int(argument) << 20)
        except MemoryError:
            os.abort()
    if command == "allocate_in_child":
        return float(subprocess.run([sys.executable, "-c", f"bytearray({argument} << 20)"]).returncode == 0)
    if command == "half_character":
        return {"score": 1.0, "pred": "\ud83d|\udc80|\ud83d\ude00"}
    if command == "raise_half_character":
        raise ValueError("no \udc80")
    if command == "has":
        return float(argument in os.environ)
    if command == "raise":
        raise KeyError(argument)
    if command == "exit":
        os._exit(int(argument))
    if command == "segfault":
        ctypes.string_at(0)
    if command == "exit_once" and not Path(argument).exists():
        Path(argument).touch()
        os._exit(1)
    if command == "modules":
        return float(any(name in sys.modules for name in ("torch", "vllm", "ray", "transformers", "pytest")))
    return float(answer == "right")

arrived = []

async def obey_at_once(answer):
    command, _, argument = answer.partition(" ")
    if command == "meet":
        arrived.append(answer)
        while len(arrived) < int(argument):
            await asyncio.sleep(0.01)
        return 1.0
    if command == "wait":
        await asyncio.sleep(float(argument))
        return 1.0
    if command == "await_cancelled":
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task
    return obey(answer)

def runs_its_own_loop(answer):
    return asyncio.run(obey_at_once(answer))
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / "worker_pool_test_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "worker_pool_test_functions"


def in_pool(
    use: Callable[[FunctionPool], Awaitable[Any]],
    spec: str,
    withheld: tuple[str, ...] = (),
    memory_gib: float | None = None,
    optional_arguments: tuple[str, ...] = (),
    **settings: Any,
) -> Any:
    target = Target(
        f"reward.function={spec}",
        spec,
        ("answer",),
        "score",
        optional_arguments=optional_arguments,
        withheld=withheld,
        memory_key="reward.worker_memory_gib",
        memory_gib=memory_gib,
    )

    async def main() -> Any:
        pool = FunctionPool(target, **{"num_workers": 1, "concurrency": 32, "timeout_s": 60.0} | settings)
        try:
            return await use(pool)
        finally:
            pool.close()

    return asyncio.run(main())


async def call_all(pool: FunctionPool, answers: tuple[str, ...]) -> list[Result]:
    return await asyncio.gather(*(pool.call({"answer": a}, f"prompt train:{i}") for i, a in enumerate(answers)))


def results(spec: str, *answers: str, **settings: Any) -> list[float | None]:
    """Return the scores, None for calls that timed out."""
    return [
        r.value["score"] if r.value else None for r in in_pool(lambda pool: call_all(pool, answers), spec, **settings)
    ]


def wait_until_dead(process_id: int, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while is_running(process_id):
        assert time.monotonic() < end, f"process {process_id} still lives after {limit_s} s"
        time.sleep(0.02)


@pytest.mark.parametrize("function", ["obey", "obey_at_once", "runs_its_own_loop"])
def test_every_call_gets_its_own_result_in_any_order_of_completion(module, function):
    answers = ("sleep 0.3", "right", "wrong", "right")
    assert results(f"{module}:{function}", *answers, num_workers=2) == [0.0, 1.0, 0.0, 1.0]


def test_arguments_that_a_function_does_not_take_are_not_sent(module):
    arguments = {"answer": "right", "turns": object()}  # no JSON can hold the object
    result = in_pool(lambda pool: pool.call(arguments, "prompt 0"), f"{module}:obey", optional_arguments=("turns",))
    assert result.value["score"] == 1.0


@pytest.mark.slow
def test_coroutines_run_concurrently_in_one_process_and_functions_sequentially(module):
    async def use(pool: FunctionPool) -> float:
        start = time.monotonic()
        assert await call_all(pool, ("wait 0.2",) * 8) == [RIGHT] * 8
        return time.monotonic() - start

    assert results(f"{module}:obey_at_once", *["meet 8"] * 8) == [1.0] * 8
    assert in_pool(use, f"{module}:obey_at_once", concurrency=2) >= 0.8
    assert in_pool(use, f"{module}:runs_its_own_loop") >= 1.6


def test_workers_import_nothing_heavy(module):
    assert results(f"{module}:obey", "modules") == [0.0]


@pytest.mark.slow
def test_a_late_call_is_killed_with_its_children(module, tmp_path):
    pid_file = tmp_path / "pid"
    started = time.monotonic()
    answers = ("right", f"hang_with_child {pid_file}", "right")
    assert results(f"{module}:obey", *answers, timeout_s=1.0) == [1.0, None, 1.0]
    assert 1.0 <= time.monotonic() - started < 30.0
    wait_until_dead(int(pid_file.read_text()), limit_s=5.0)


@pytest.mark.parametrize("command", ["escape", "escape_and_hang", "escape_and_exit"])
@pytest.mark.parametrize("function", ["obey", "obey_at_once"])
@pytest.mark.slow
def test_a_daemon_of_a_function_ends_with_its_worker(module, tmp_path, function, command):
    """At the latest when the pool is closed; when the call is late or the worker exits, with that worker."""
    pid_file = tmp_path / "pids"

    async def use(pool: FunctionPool) -> None:
        call = pool.call({"answer": f"{command} {pid_file}"}, "")
        (outcome,) = await asyncio.gather(call, return_exceptions=True)
        if command == "escape":
            assert outcome == Result({"score": 0.0, "pred": None})
            (daemon,) = process_ids(pid_file)
            assert is_running(daemon)  # the worker lives, too
            return
        assert isinstance(outcome, FunctionFailed) or outcome == Result(None, timed_out=True)
        for daemon in process_ids(pid_file):
            wait_until_dead(daemon, limit_s=20.0)

    in_pool(use, f"{module}:{function}", timeout_s=5.0)
    for daemon in process_ids(pid_file):
        wait_until_dead(daemon, limit_s=20.0)


def process_ids(pid_file: Path) -> list[int]:
    return [int(line) for line in pid_file.read_text().splitlines()]


def test_a_late_coroutine_is_cancelled_and_delays_no_other(module):
    assert results(f"{module}:obey_at_once", "wait 0.2", "wait 60", "right", timeout_s=1.0) == [1.0, None, 1.0]


@pytest.mark.parametrize("function", ["obey", "obey_at_once"])
@pytest.mark.slow
def test_a_reply_that_waits_while_the_event_loop_is_blocked_is_in_time(module, function):
    async def use(pool: FunctionPool) -> Result:
        call = asyncio.create_task(pool.call({"answer": "right"}, ""))
        for _ in range(20):  # The call is written, and the worker replies while this loop is blocked.
            await asyncio.sleep(0)
        time.sleep(5.0)
        return await call

    assert in_pool(use, f"{module}:{function}", timeout_s=2.0) == RIGHT


def test_a_coroutine_that_blocks_its_process_for_a_while_does_not_make_its_neighbours_late(module):
    answers = ("wait 0.2", "sleep 1.4", "wait 0.2")
    found = results(f"{module}:obey_at_once", *answers, timeout_s=1.0)
    assert (found[0], found[2]) == (1.0, 1.0)


def test_a_result_later_than_the_limit_by_the_workers_own_clock_is_late(module):
    """Also where this event loop is blocked and reads it no later than other results."""

    async def use(pool: FunctionPool) -> Result:
        call = asyncio.create_task(pool.call({"answer": "sleep 1"}, ""))
        for _ in range(20):
            await asyncio.sleep(0)
        time.sleep(1.5)
        return await call

    assert in_pool(use, f"{module}:obey", timeout_s=0.5) == Result(None, timed_out=True)


@pytest.mark.parametrize("blocker", ["sleep 60", "segfault"])
@pytest.mark.slow
def test_a_coroutine_that_blocks_or_ends_the_process_does_not_affect_other_calls(module, blocker):
    async def use(pool: FunctionPool) -> list[Any]:
        answers = ("wait 0.3", blocker, "right", "wait 0.3")
        calls = [pool.call({"answer": a}, f"prompt train:{i}") for i, a in enumerate(answers)]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = in_pool(use, f"{module}:obey_at_once", timeout_s=1.5)
    assert [found[0], found[2], found[3]] == [RIGHT] * 3
    if blocker == "segfault":
        assert isinstance(found[1], FunctionFailed)
        assert "ended its process twice (signal SIGSEGV) on prompt train:1" in str(found[1])
    else:
        assert found[1] == Result(None, timed_out=True)


def test_a_worker_that_dies_once_is_replaced_and_the_call_repeated(module, tmp_path):
    assert results(f"{module}:obey", "right", f"exit_once {tmp_path / 'mark'}", "right") == [1.0, 0.0, 1.0]


def test_a_worker_killed_between_two_calls_is_replaced(module):
    async def use(pool: FunctionPool) -> None:
        assert await pool.call({"answer": "right"}, "") == RIGHT
        (worker_id,) = children()
        os.kill(worker_id, signal.SIGKILL)
        assert await pool.call({"answer": "right"}, "") == RIGHT

    in_pool(use, f"{module}:obey")


def test_a_coroutine_that_awaits_a_cancelled_task_has_raised_and_is_not_late(module):
    with pytest.raises(FunctionFailed, match="CancelledError"):
        results(f"{module}:obey_at_once", "await_cancelled")


def test_a_worker_that_cannot_be_replaced_fails_the_calls_that_wait(module, monkeypatch):
    async def use(pool: FunctionPool) -> None:
        def refused(*_: object, **__: object) -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr("megatron_bapo.functions.worker_pool.start_process", refused)
        with pytest.raises(RunError, match=r"no worker process for .* could be started: .*temporarily unavailable"):
            await pool.call({"answer": "exit 1"}, "")

    in_pool(use, f"{module}:obey")


def test_a_call_that_is_cancelled_leaves_no_busy_process_behind(module):
    async def use(pool: FunctionPool) -> None:
        task = asyncio.ensure_future(pool.call({"answer": "sleep 60"}, ""))
        await asyncio.sleep(0.5)
        (busy,) = children()
        task.cancel()
        assert await pool.call({"answer": "right"}, "") == RIGHT
        wait_until_dead(busy, limit_s=5.0)

    in_pool(use, f"{module}:obey", timeout_s=5.0)


def children() -> list[int]:
    """Return the living workers among this process's children; Torch has child processes, too."""
    return [p.pid for p in psutil.Process().children() if "megatron_bapo.functions.worker" in command_line(p)]


@pytest.mark.parametrize(("answer", "end"), [("exit 3", "exit code 3"), ("segfault", "signal SIGSEGV")])
def test_a_call_that_ends_its_process_twice_is_named(module, answer, end):
    with pytest.raises(FunctionFailed, match=rf"{module}:obey ended its process twice \({end}\) on prompt train:1"):
        results(f"{module}:obey", "right", answer)


@pytest.mark.parametrize("function", ["obey", "obey_at_once"])
def test_a_function_that_raises_is_named_with_its_trace(module, function):
    with pytest.raises(FunctionFailed) as caught:
        results(f"{module}:{function}", "right", "raise oops", "sleep 0.1", num_workers=2)
    message = str(caught.value)
    assert f"reward.function={module}:{function} failed on prompt train:1" in message
    assert "KeyError: 'oops'" in message
    assert "raise KeyError(argument)" in message


@pytest.mark.parametrize("function", ["obey", "obey_at_once"])
def test_a_call_that_exceeds_the_memory_limit_fails_and_names_the_key(module, function):
    async def use(pool: FunctionPool) -> list[Any]:
        answers = ("right", "allocate 1500", "right")
        calls = [pool.call({"answer": a}, f"prompt train:{i}") for i, a in enumerate(answers)]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = in_pool(use, f"{module}:{function}", memory_gib=1.0)
    assert [found[0], found[2]] == [RIGHT] * 2
    assert isinstance(found[1], FunctionFailed)
    assert (
        f"reward.function={module}:{function} ran out of memory on prompt train:1; raise its memory limit "
        "reward.worker_memory_gib=1, or set it to null for no limit:\n"
    ) in str(found[1])
    assert "MemoryError" in str(found[1])


def test_a_call_that_ends_its_process_names_the_memory_limit(module):
    with pytest.raises(
        FunctionFailed, match=r"twice \(signal SIGABRT; memory limit reward.worker_memory_gib=1\) on prompt train:0"
    ):
        results(f"{module}:obey", "abort_without_memory 1500", memory_gib=1.0)


def test_memory_that_earlier_calls_have_kept_does_not_fail_a_call(module):
    assert results(f"{module}:obey", *["leak 400"] * 5, memory_gib=1.0) == [1.0] * 5


def test_without_a_memory_limit_any_size_is_allowed(module):
    assert results(f"{module}:obey", "allocate 1500") == [1.0]


def test_the_memory_limit_applies_to_each_child_process_as_well(module):
    assert results(f"{module}:obey", "allocate_in_child 1500", "allocate_in_child 10", memory_gib=1.0) == [0.0, 1.0]


@pytest.mark.parametrize("end", ["raise", "os._exit(1)"])
def test_an_import_that_exceeds_the_memory_limit_names_the_key(tmp_path, monkeypatch, end):
    source = f"import os\ntry:\n    table = bytearray(1500 << 20)\nexcept MemoryError:\n    {end}\n"
    (tmp_path / f"worker_pool_test_table{len(end)}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((UserError, RunError), match=r"reward.worker_memory_gib=1"):
        results(f"worker_pool_test_table{len(end)}:f", memory_gib=1.0)


@pytest.mark.parametrize("function", ["obey", "obey_at_once"])
def test_half_characters_in_results_and_errors_are_replaced(module, function, tmp_path):
    """JSON carries a lone surrogate, but UTF-8, a tokenizer and Parquet refuse it."""

    async def use(pool: FunctionPool) -> list[Any]:
        calls = [pool.call({"answer": answer}, "prompt") for answer in ("half_character", "raise_half_character")]
        return await asyncio.gather(*calls, return_exceptions=True)

    result, error = in_pool(use, f"{module}:{function}")
    assert result == Result({"score": 1.0, "pred": "\ufffd|\ufffd|\U0001f600"})
    pq.write_table(pa.table({"pred": [result.value["pred"]]}), tmp_path / "pred.parquet")
    assert isinstance(error, FunctionFailed)
    assert "ValueError: no \ufffd" in str(error)
    str(error).encode()


def test_a_function_that_cannot_be_loaded_is_found_at_construction(module):
    with pytest.raises(UserError, match="has no 'obeys'; did you mean 'obey'"):
        results(f"{module}:obeys")


def test_a_module_that_ends_its_process_at_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "worker_pool_test_exits.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunError, match=r"importing reward.function=worker_pool_test_exits:f .*\(exit code 7\)"):
        results("worker_pool_test_exits:f")


PARENT = """
import asyncio, os, sys
from pathlib import Path
from megatron_bapo.functions.user_function import Target
from megatron_bapo.functions.worker_pool import FunctionPool

async def main():
    target = Target("obey", f"worker_pool_test_functions:{sys.argv[1]}", ("answer",), "score")
    pool = FunctionPool(target, num_workers=1, concurrency=2, timeout_s=float(sys.argv[3]))
    print(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().strip(), flush=True)
    try:
        await pool.call({"answer": sys.argv[2]}, "")
        await asyncio.sleep(60)
    finally:
        pool.close()

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def start_parent(tmp_path: Path, function: str, answer: str, timeout_s: float) -> tuple[subprocess.Popen[str], int]:
    """Start a program with one call and return it with the process id of its worker."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
    command = [sys.executable, str(script), function, answer, str(timeout_s)]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.usefixtures("module")
@pytest.mark.slow
def test_a_daemon_of_a_function_ends_when_the_run_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    parent, worker_id = start_parent(tmp_path, "obey", f"escape_and_hang {pid_file}", timeout_s=50.0)
    with parent:
        while not pid_file.exists() or not process_ids(pid_file):
            assert parent.poll() is None
            time.sleep(0.05)
        parent.kill()
    for process_id in (worker_id, *process_ids(pid_file)):
        wait_until_dead(process_id, limit_s=20.0)


@pytest.mark.parametrize(
    ("function", "answer", "limit_s"),
    [("obey", "right", 5.0), ("obey", "sleep 60", 9.0), ("obey_at_once", "sleep 60", 9.0)],
    ids=["idle", "busy", "busy coroutine"],
)
@pytest.mark.usefixtures("module")
@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path, function, answer, limit_s):
    parent, worker_id = start_parent(tmp_path, function, answer, timeout_s=1.5)
    with parent:
        time.sleep(0.5)
        parent.kill()
    wait_until_dead(worker_id, limit_s)


@pytest.mark.usefixtures("module")
def test_ctrl_c_reaches_the_parent_alone_which_kills_its_workers(tmp_path):
    parent, worker_id = start_parent(tmp_path, "obey", "sleep 60", timeout_s=50.0)
    with parent:
        time.sleep(0.5)
        os.killpg(parent.pid, signal.SIGINT)
        output, errors = parent.communicate(timeout=10.0)
    assert output == "interrupted\n"
    assert errors == ""
    wait_until_dead(worker_id, limit_s=5.0)


def test_a_function_gets_its_own_variables_and_no_secrets_of_others(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "OF_THE_REWARD", "OF_THE_USER")
    for name in names:
        monkeypatch.setenv(name, "value")
    asked = [f"has {name}" for name in names]
    assert results(f"{module}:obey", *asked, withheld=("OF_THE_REWARD",)) == [0.0, 0.0, 0.0, 1.0]
