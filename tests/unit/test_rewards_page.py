"""The examples of docs/guides/rewards_and_environments.md, as they stand there."""

import asyncio
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_bapo.config.schema import Config
from megatron_bapo.model.hf_create import byte_tokenizer
from megatron_bapo.records import Prompt
from megatron_bapo.rewards.scorer import RewardRequest, Scorer
from megatron_bapo.rollout.environment import FunctionEnvironment
from megatron_bapo.rollout.sft_demonstrations import SftDemonstrations
from megatron_bapo.rollout.tokenization import tokenize
from tests.ports import free_port

PAGE = (Path(__file__).parents[2] / "docs/guides/rewards_and_environments.md").read_text()
BLOCKS = re.findall(r"```(python|yaml)\n(.*?)```", PAGE, re.DOTALL)
BASE = {
    "run_dir": "unused",
    "model": {"create": {}},
    "data": {"train": {"path": "unused.jsonl"}, "chat_template": False},
    "trainer": {"total_steps": 1, "train_batch_size": 8, "ppo_mini_batch_size": 8},
}
PROMPT = ({"role": "user", "content": "40 + 2 ="},)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the page's modules."""
    modules = [code for kind, code in BLOCKS if kind == "python"]
    for code in modules:
        (tmp_path / code.split()[1]).write_text(code)
    assert len(modules) == 5
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def configs() -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for kind, text in BLOCKS if kind == "yaml"]


def config(text: str, **changes: Any) -> Config:
    """The one of the page with this text."""
    (found,) = [found for found in configs() if text in str(found)]
    return Config.model_validate(BASE | found | changes)


def scores(config: Config, *answers: str) -> list[float]:
    async def main() -> list[float]:
        scorer = Scorer(config.reward)
        try:
            requests = [RewardRequest("train:0", "sums", answer, "42", {}, PROMPT) for answer in answers]
            return [result.reward for result in await asyncio.gather(*map(scorer.score, requests))]
        finally:
            scorer.close()

    return asyncio.run(main())


def test_every_configuration_on_the_page_is_valid():
    found = [Config.model_validate(BASE | tree | {"data": BASE["data"] | tree.get("data", {})}) for tree in configs()]
    assert len(found) == 5
    assert found[-1].warm_start is not None


@pytest.mark.usefixtures("folder")
def test_the_functions_score():
    assert scores(config("my_rewards"), "It is 42", "41", "42" * 100) == [1.0, 0.5, 0.5]
    assert scores(config("my_async_rewards"), "42", "41") == [1.0, 0.0]


def test_the_server_scores(folder: Path, monkeypatch: pytest.MonkeyPatch):
    port = free_port()
    reward = config("remote").reward
    assert reward.remote is not None
    remote = reward.remote.model_copy(update={"url": reward.remote.url.replace("8000", str(port))})
    monkeypatch.setenv("REWARD_AUTHORIZATION", "Bearer unused")
    server = subprocess.Popen([sys.executable, str(folder / "my_server.py"), str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_until_open(port)
        at_port = Config.model_validate(BASE | {"reward": {**reward.model_dump(), "remote": remote.model_dump()}})
        assert scores(at_port, "42", "41") == [1.0, 0.0]
    finally:
        server.kill()
        server.wait(10)


def wait_until_open(port: int) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            assert time.monotonic() < end, "the server does not listen"
            time.sleep(0.05)
        else:
            return


@pytest.mark.usefixtures("folder")
def test_the_environment_replies():
    async def main() -> list[str | None]:
        settings = config("my_environment")
        assert settings.environment is not None
        environment = FunctionEnvironment(settings.environment, settings.data, byte_tokenizer(["a", "b"]))
        prompt = Prompt("train:0", PROMPT, "42", "guessing")
        try:
            turns = [[{"role": "assistant", "content": guess}] for guess in ("7", "50", "many", "42")]
            replies = await asyncio.gather(*(environment.reply(prompt, turn) for turn in turns))
            return [reply and reply.message["content"] for reply in replies]
        finally:
            environment.close()

    assert asyncio.run(main()) == ["Higher.", "Lower.", "Write a whole number.", None]


@pytest.mark.usefixtures("folder")
def test_the_demonstration_shows_a_reply():
    async def main() -> str:
        settings, tokenizer = config("my_demonstration", environment={"max_turns": 8}), byte_tokenizer(["a", "b"])
        examples = SftDemonstrations(settings, tokenizer)
        try:
            prompt = Prompt("train:0", PROMPT, "42", "guessing")
            (example,) = await examples.for_prompts(tokenize([prompt], tokenizer, settings.data))
            return example.text
        finally:
            examples.close()

    assert asyncio.run(main()) == "0Higher.42"
