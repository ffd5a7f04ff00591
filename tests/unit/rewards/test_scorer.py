import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megatron_bapo.config.schema import RewardConfig
from megatron_bapo.errors import FunctionFailed, RunError, UserError
from megatron_bapo.rewards.scorer import RewardRequest, RewardResult, Scorer

# What the answer says is what the function does.
REWARD_MODULE = """
import asyncio, ctypes, os, subprocess, sys, time
from pathlib import Path

def obey(data_source, solution_str, ground_truth, extra_info=None):
    command, _, argument = solution_str.partition(" ")
    if command == "sleep":
        time.sleep(float(argument))
    if command == "hang_with_child":
        child = subprocess.Popen(["sleep", "60"])
        Path(argument).write_text(str(child.pid))
        time.sleep(60)
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
    return float(solution_str == ground_truth)

async def patient(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    return {"score": float(solution_str == ground_truth)}
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / "scorer_test_rewards.py").write_text(REWARD_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "scorer_test_rewards"


def config(function: str, timeout_s: float = 60.0, num_workers: int = 1, timeout_reward: float = 0.0) -> RewardConfig:
    return RewardConfig(
        type="function", function=function, timeout_s=timeout_s, num_workers=num_workers, timeout_reward=timeout_reward
    )


def requests(*answers: str) -> list[RewardRequest]:
    return [RewardRequest(f"train:{i}", "test", answer, "right") for i, answer in enumerate(answers)]


def is_alive(process_id: int) -> bool:
    stat = Path(f"/proc/{process_id}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_dead(process_id: int, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while is_alive(process_id):
        assert time.monotonic() < end, f"process {process_id} still lives after {limit_s} s"
        time.sleep(0.02)


def test_results_keep_the_order_of_the_requests(module):
    with Scorer(config(f"{module}:obey", num_workers=2)) as scorer:
        results = scorer.score(requests("sleep 0.3", "right", "wrong", "right"))
        assert results == [RewardResult(0.0), RewardResult(1.0), RewardResult(0.0), RewardResult(1.0)]
        assert scorer.score([]) == []
        assert scorer.score(requests("right")) == [RewardResult(1.0)]


def test_async_functions_score(module):
    with Scorer(config(f"{module}:patient")) as scorer:
        assert scorer.score(requests("right", "wrong")) == [RewardResult(1.0), RewardResult(0.0)]


def test_math_and_reasoning_gym_rewards_are_served():
    request = RewardRequest(
        "train:0", "reasoning_gym/chain_sum", "42", "42", {"question": "", "answer": "42", "metadata": {}}
    )
    for kind in ("math_verify", "reasoning_gym"):
        with Scorer(RewardConfig(type=kind)) as scorer:
            assert scorer.score([request]) == [RewardResult(1.0)]


def test_without_partial_credit_only_a_full_score_counts():
    config = RewardConfig(type="reasoning_gym", partial_credit=False)
    entry = {"question": "40 + 2 =", "answer": "42", "metadata": {}}
    answers = ["42", "142", "41"]
    with Scorer(config) as scorer:
        results = scorer.score(
            [RewardRequest("train:0", "reasoning_gym/chain_sum", answer, "42", entry) for answer in answers]
        )
    assert [result.reward for result in results] == [1.0, 0.0, 0.0]


def test_workers_import_nothing_heavy(module):
    with Scorer(config(f"{module}:obey")) as scorer:
        assert scorer.score(requests("modules")) == [RewardResult(0.0)]


def test_a_late_answer_is_killed_with_its_children_and_counted(module, tmp_path):
    pid_file = tmp_path / "pid"
    with Scorer(config(f"{module}:obey", timeout_s=1.0, timeout_reward=-0.5)) as scorer:
        started = time.monotonic()
        results = scorer.score(requests("right", f"hang_with_child {pid_file}", "right"))
        assert 1.0 <= time.monotonic() - started < 5.0
        assert results == [RewardResult(1.0), RewardResult(-0.5, timed_out=True), RewardResult(1.0)]
        assert scorer.num_timeouts == 1
    wait_until_dead(int(pid_file.read_text()), limit_s=5.0)


def test_a_worker_that_dies_once_is_replaced_and_the_answer_scored(module, tmp_path):
    with Scorer(config(f"{module}:obey")) as scorer:
        results = scorer.score(requests("right", f"exit_once {tmp_path / 'mark'}", "right"))
        assert [result.reward for result in results] == [1.0, 0.0, 1.0]


def test_a_worker_killed_between_two_batches_is_replaced(module):
    with Scorer(config(f"{module}:obey")) as scorer:
        (worker_id,) = map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
        os.kill(worker_id, signal.SIGKILL)
        assert scorer.score(requests("right")) == [RewardResult(1.0)]


@pytest.mark.parametrize(("answer", "end"), [("exit 3", "exit code 3"), ("segfault", "signal SIGSEGV")])
def test_an_answer_that_ends_its_process_twice_is_named(module, answer, end):
    with (
        Scorer(config(f"{module}:obey")) as scorer,
        pytest.raises(FunctionFailed, match=rf"{module}:obey ended its process twice \({end}\) .*train:1.*'{answer}'"),
    ):
        scorer.score(requests("right", answer))


def test_a_function_that_raises_is_named_with_prompt_and_trace_and_scores_other_answers(module):
    with Scorer(config(f"{module}:obey", num_workers=2)) as scorer:
        with pytest.raises(FunctionFailed) as caught:
            scorer.score(requests("right", "raise oops", "sleep 20"))
        assert scorer.score(requests("right", "wrong")) == [RewardResult(1.0), RewardResult(0.0)]
    message = str(caught.value)
    assert f"{module}:obey failed on an answer to prompt train:1" in message
    assert "KeyError: 'oops'" in message
    assert "raise KeyError(argument)" in message


def test_a_function_that_cannot_be_loaded_is_found_at_construction(module):
    with pytest.raises(UserError, match="has no 'obeys'; did you mean 'obey'"):
        Scorer(config(f"{module}:obeys"))


def test_a_module_that_ends_its_process_at_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "scorer_test_exits.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunError, match=r"importing reward function scorer_test_exits:f .*\(exit code 7\)"):
        Scorer(config("scorer_test_exits:f"))


PARENT = """
import os, sys, time
from pathlib import Path
from megatron_bapo.config.schema import RewardConfig
from megatron_bapo.rewards.scorer import RewardRequest, Scorer

scorer = Scorer(RewardConfig(type="function", function="scorer_test_rewards:obey", timeout_s=float(sys.argv[2])))
print(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().strip(), flush=True)
try:
    scorer.score([RewardRequest("p", "d", sys.argv[1], "right")])
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def start_parent(tmp_path: Path, answer: str, timeout_s: float) -> tuple[subprocess.Popen[str], int]:
    """A program that scores one answer, and the process id of its worker."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
    command = [sys.executable, str(script), answer, str(timeout_s)]
    parent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize(("answer", "limit_s"), [("right", 5.0), ("sleep 60", 9.0)], ids=["idle", "scoring"])
@pytest.mark.usefixtures("module")
def test_workers_end_when_their_parent_is_killed(tmp_path, answer, limit_s):
    parent, worker_id = start_parent(tmp_path, answer, timeout_s=1.5)
    with parent:
        time.sleep(0.5)
        parent.kill()
    wait_until_dead(worker_id, limit_s)


@pytest.mark.usefixtures("module")
def test_ctrl_c_reaches_the_parent_alone_which_kills_its_workers(tmp_path):
    parent, worker_id = start_parent(tmp_path, "sleep 60", timeout_s=50.0)
    with parent:
        time.sleep(0.5)
        os.killpg(parent.pid, signal.SIGINT)
        output, errors = parent.communicate(timeout=10.0)
    assert output == "interrupted\n"
    assert errors == ""
    wait_until_dead(worker_id, limit_s=5.0)
