"""The examples of docs/guides/data.md, as they stand there."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from megatron_bapo.config.data import PromptSourceConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.data.prompts import load_prompts
from tests.unit.test_rewards_page import BASE
from tests.unit.test_tools import run

PAGE = (Path(__file__).parents[2] / "docs/guides/data.md").read_text()
FORMATS, TRAIN, HELD_OUT = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
((COMMAND, SHOWN),) = re.findall(r"^\$ python tools/prepare_data.py (.+)\n((?:.*\n)+?)```", PAGE, re.MULTILINE)


def test_every_configuration_on_the_page_is_valid():
    trees = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    found = [Config.model_validate(BASE | tree | {"data": BASE["data"] | tree["data"]}) for tree in trees]

    assert len(found) == 4
    held_out, generated = found[1].data.validation, found[2].data.train
    assert held_out is not None
    assert held_out.choices_key == "options"
    assert generated.reasoning_gym is not None
    assert len(load_prompts(generated, name="train", system_prompt=None).prompts) == 1000
    assert found[-1].data.curriculum is not None


def test_every_format_on_the_page_is_read(tmp_path: Path):
    (tmp_path / "sums.jsonl").write_text(FORMATS)
    prompts = load_prompts(PromptSourceConfig(path=tmp_path / "sums.jsonl"), name="train", system_prompt=None).prompts

    assert [prompt.ground_truth for prompt in prompts] == ["42"] * 3
    assert [prompt.data_source for prompt in prompts] == ["sums"] * 3
    assert len({str(prompt.messages) for prompt in prompts}) == 1


def test_the_page_shows_what_prepare_data_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "train.jsonl").write_text(TRAIN)
    (tmp_path / "heldout.jsonl").write_text(HELD_OUT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    assert run(monkeypatch, "prepare_data", *shlex.split(COMMAND)) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in SHOWN.splitlines() if line not in printed] == []
