"""The examples of docs/guides/code.md, as they stand there."""

import asyncio
import re
from pathlib import Path

import pytest
import yaml

from megatron_bapo.config.schema import Config
from megatron_bapo.environments.python_tool import reply
from megatron_bapo.rewards.code_tests import read_tests
from tests.sandboxes import needs_sandbox

PAGE = (Path(__file__).parents[2] / "docs/guides/code.md").read_text()
REWARD, TOOL = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
DATA = {"train": {"path": "unused.jsonl"}, "chat_template": False}
BASE = {
    "run_dir": "unused",
    "model": {"create": {}},
    "trainer": {"total_steps": 1, "train_batch_size": 8, "ppo_mini_batch_size": 8},
}
GROUND_TRUTHS = re.findall(r"^\| `([{[].*?[}\]])`", PAGE, re.MULTILINE)


def test_the_configurations_are_valid() -> None:
    config = Config.model_validate({**BASE, "data": DATA | TOOL["data"], "environment": TOOL["environment"]} | REWARD)
    assert config.reward.type == "code"
    assert config.environment is not None
    assert config.environment.type == "python"


@pytest.mark.parametrize("ground_truth", GROUND_TRUTHS)
def test_the_ground_truths_are_read(ground_truth: str) -> None:
    assert len(read_tests(ground_truth, {"func_name": "double"})) == 1


def test_no_ground_truth_of_the_page_is_overlooked() -> None:
    assert len(GROUND_TRUTHS) == 5


@needs_sandbox
def test_the_tools_example_gives_its_reply() -> None:
    (call, output) = re.findall(r"contains `(<python>.*?</python>)` is what the program prints, `(\d+)`", PAGE)[0]
    message = {"role": "assistant", "content": call}
    assert asyncio.run(reply([message], "d", "42", cpu_s=6.0, memory_gib=1.0)) == output
