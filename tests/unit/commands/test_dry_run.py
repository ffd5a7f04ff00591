"""On real prompts, tokenizers and reward functions, and a real reward server on loopback."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_bapo.commands.dry_run import MAX_PROMPT_CHARACTERS, DryRun, dry_run
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from tests.sandboxes import needs_sandbox

REWARDS = """
import os, time

def exact(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def constant(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5

def inverted(data_source, solution_str, ground_truth, extra_info=None):
    return float(not solution_str)

def raises(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError("no \\x1b[31mcolor")

def raises_on_nothing(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 / len(solution_str)

def sleeps(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(60)

def dies(data_source, solution_str, ground_truth, extra_info=None):
    os._exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with prompts and reward functions, which is the only content that a dry run may leave."""
    (tmp_path / "dry_run_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"What is 1 + {i}?", "answer": str(1 + i)} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return tmp_path


def config(folder: Path, **sections: dict[str, object]) -> Config:
    tree: dict[str, object] = {
        "run_dir": folder / "run",
        "model": {"create": {}, "dtype": "float32"},
        "data": {"max_prompt_length": 64, "chat_template": False, "train": {"path": folder / "prompts.jsonl"}},
        "reward": {"type": "function", "function": "dry_run_rewards:exact"},
        "rollout": {"n": 2, "max_response_length": 8},
        "trainer": {"total_steps": 2, "train_batch_size": 8, "ppo_mini_batch_size": 8},
    }
    return Config.model_validate(tree | sections)


def found(checked: Config, **options: bool) -> DryRun:
    return dry_run(checked, None, lambda activity: None, **options)


def with_reward(folder: Path, name: str, **settings: object) -> DryRun:
    return found(config(folder, reward={"type": "function", "function": f"dry_run_rewards:{name}", **settings}))


def test_the_first_prompt_is_shown_with_its_tokens_and_their_limit_and_nothing_is_written(folder: Path) -> None:
    before = sorted(folder.iterdir())
    shown = found(config(folder))
    # One token for the words with which all prompts begin, then bytes: "0" and "?".
    assert shown.prompt == "What is 1 + 0?"
    assert shown.prompt_title == "first training prompt: 3 tokens (the longest of 4 has 3; data.max_prompt_length=64)"
    assert shown.warnings == []
    assert sorted(folder.iterdir()) == before


def test_activities_are_named_in_their_order(folder: Path) -> None:
    activities: list[str] = []
    dry_run(config(folder), None, activities.append)
    assert activities == [
        "reading prompts",
        "loading the tokenizer",
        "tokenizing 4 prompts",
        "scoring the ground truth of the first prompt",
    ]


def test_the_ground_truth_and_an_empty_response_are_scored(folder: Path) -> None:
    assert found(config(folder)).facts == [
        "ground truth: 1",
        "reward of the ground truth 1.0, of an empty response 0.0",
    ]


def test_math_verify_gets_the_ground_truth_as_a_final_answer(folder: Path) -> None:
    rows = [{"prompt": f"{i}?", "answer": json.dumps(["\\frac12", "0.5"])} for i in range(4)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    shown = found(config(folder, reward={"type": "math_verify"}))
    assert shown.facts[-1] == "reward of the ground truth in \\boxed{} 1.0, of an empty response 0.0"
    assert shown.warnings == []


@pytest.fixture
def tests_of_programs(folder: Path) -> None:
    row = {"prompt": "?", "answer": {"inputs": ["1", "2"], "outputs": ["", "2"]}}
    (folder / "prompts.jsonl").write_text(4 * f"{json.dumps(row)}\n")


@needs_sandbox
@pytest.mark.usefixtures("tests_of_programs")
def test_an_empty_program_runs_in_the_sandbox_and_tests_are_no_response_to_prefer(folder: Path) -> None:
    shown = found(config(folder, reward={"type": "code"}))
    assert shown.facts[-1] == "reward of a program without statements 0.5, of an empty response 0.0"
    assert shown.warnings == []


@pytest.mark.usefixtures("tests_of_programs")
def test_a_machine_without_a_sandbox_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(UserError, match="the sandbox needs bwrap"):
        found(config(folder, reward={"type": "code"}))


@pytest.mark.parametrize(("name", "scores"), [("constant", ("0.5", "0.5")), ("inverted", ("0.0", "1.0"))])
def test_a_reward_that_does_not_prefer_the_ground_truth_is_warned_of(
    folder: Path, name: str, scores: tuple[str, str]
) -> None:
    shown = with_reward(folder, name)
    right, empty = scores
    assert shown.facts[-1] == f"reward of the ground truth {right}, of an empty response {empty}"
    (warning,) = shown.warnings
    assert f"gives the ground truth {right} and an empty response {empty}, so it does not prefer" in warning


@pytest.mark.parametrize(
    ("name", "scored", "expected"),
    [
        ("raises", "reward of the ground truth failed", "ValueError: no \\x1b[31mcolor"),
        (
            "raises_on_nothing",
            "reward of the ground truth 1.0, of an empty response failed",
            "ZeroDivisionError: float division by zero",
        ),
        (
            "dies",
            "reward of the ground truth failed",
            "ended its process twice (exit code 3; memory limit reward.worker_memory_gib=4)",
        ),
    ],
)
def test_a_reward_that_fails_is_a_warning_with_its_message(folder: Path, name: str, scored: str, expected: str) -> None:
    shown = with_reward(folder, name)
    assert shown.facts[-1] == scored
    (warning,) = shown.warnings
    assert warning.startswith(f"the reward failed: reward.function=dry_run_rewards:{name} ")
    assert expected in warning
    assert "\x1b" not in warning


def test_a_reward_that_is_late_is_a_warning_with_its_limit(folder: Path) -> None:
    shown = with_reward(folder, "sleeps", timeout_s=0.2)
    assert shown.facts[-1] == "reward of the ground truth timed out"
    (warning,) = shown.warnings
    assert "did not score the ground truth within reward.timeout_s=0.2 s" in warning


def test_a_reward_that_cannot_be_imported_is_an_error(folder: Path) -> None:
    with pytest.raises(UserError, match="dry_run_rewards has no 'exacd'; did you mean 'exact'"):
        with_reward(folder, "exacd")


class RewardServer(BaseHTTPRequestHandler):
    responses: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.responses.append(body["response"])
        refused = self.path == "/broken"
        self.send_response(500 if refused else 200)
        self.end_headers()
        self.wfile.write(b"out of memory" if refused else str(len(body["response"])).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    RewardServer.responses.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), RewardServer) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_a_reward_server_scores_both_responses(folder: Path, server: str) -> None:
    shown = found(config(folder, reward={"type": "remote", "remote": {"url": f"{server}/score"}}))
    assert shown.facts[-1] == "reward of the ground truth 1.0, of an empty response 0.0"
    assert RewardServer.responses == ["1", ""]


def test_a_reward_server_that_fails_is_asked_once_and_named(folder: Path, server: str) -> None:
    shown = found(config(folder, reward={"type": "remote", "remote": {"url": f"{server}/broken"}}))
    assert RewardServer.responses == ["1"]
    (warning,) = shown.warnings
    assert f"the reward failed: the reward server {server}/broken gave no reward after 1 try" in warning
    assert warning.endswith("status 500: 'out of memory' (training retries 3 times)")


def test_an_environment_is_shown_with_its_largest_number_of_turns(folder: Path) -> None:
    shown = found(config(folder, environment={"type": "calculator", "max_turns": 6}))
    assert "environment: calculator, at most 6 turns per response" in shown.facts


def test_a_long_prompt_is_shortened_and_its_control_characters_are_escaped(folder: Path) -> None:
    row = {"prompt": "\x1b[31m" + "a" * 5000 + "the end", "answer": "line one\nline two"}
    (folder / "prompts.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    data = {"max_prompt_length": 6000, "chat_template": False, "train": {"path": folder / "prompts.jsonl"}}
    shown = found(config(folder, data=data))
    assert shown.prompt.startswith("\\x1b[31maaa")
    assert "characters not shown" in shown.prompt
    assert shown.prompt.endswith("the end")
    assert len(shown.prompt) < MAX_PROMPT_CHARACTERS + 60
    assert shown.facts[0] == "ground truth: line one\\nline two"


def test_what_the_run_directory_holds_and_a_missing_wandb_key_are_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").touch()
    checked = config(folder, logging={"wandb": {"project": "bapo"}})
    shown = found(checked)
    assert "holds a run without a checkpoint" in shown.facts[-1]
    assert "no key for api.wandb.ai" in shown.warnings[-1]
    assert found(checked, rollout_only=True).warnings == []  # metrics are the trainer's
