"""The configurations and the printed batch arithmetic in README.md and docs/get_started/."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from megatron_bapo.cli.main import app
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/get_started").glob("*.md"))]
BLOCKS = [(page, text) for page in PAGES for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]
COMPLETE = [(page, text) for page, text in BLOCKS if "extends:" in text]
SECTIONS = [(page, text) for page, text in BLOCKS if "extends:" not in text]
BASE = {"run_dir": "unused", "model": {"create": {}}, "data": {"train": {"path": "unused.jsonl"}}}
QUICKSTART = (ROOT / "docs/get_started/quickstart.md").read_text()
((CONFIG, SHOWN),) = re.findall(r"^\$ megatron-bapo train (\S+) --dry-run\n((?:.*\n)+?)```", QUICKSTART, re.MULTILINE)


@pytest.mark.parametrize(("page", "text"), COMPLETE, ids=lambda value: getattr(value, "name", ""))
def test_a_configuration_of_the_readers_own_loads(page: Path, text: str, tmp_path: Path):
    (tmp_path / "my.yaml").write_text(text.replace("extends: ", f"extends: {ROOT}/"))

    assert load_config(tmp_path / "my.yaml").run_dir == Path("runs/mine")


@pytest.mark.parametrize(("page", "text"), SECTIONS, ids=lambda value: getattr(value, "name", ""))
def test_a_part_of_a_configuration_is_valid(page: Path, text: str):
    tree = yaml.safe_load(text)
    Config.model_validate(BASE | tree | {"trainer": {"total_steps": 1, **tree["trainer"]}})


def test_the_pages_have_configurations():
    assert (len(COMPLETE), len(SECTIONS)) == (3, 1)


def test_the_prompts_of_the_laptops_configuration_can_be_replaced():
    """As docs/get_started/first_model.md says."""
    changes = [
        f"data.{name}={{path: mine.jsonl, reasoning_gym: null, size: null, seed: null}}"
        for name in ("train", "validation")
    ]

    assert load_config(ROOT / "configs/smollm2_135m_cpu.yaml", changes).data.train.path == Path("mine.jsonl")


@pytest.mark.slow
def test_the_quickstart_page_shows_what_the_dry_run_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # where the run is not finished

    result = CliRunner().invoke(app, ["train", str(ROOT / CONFIG), "--dry-run"], env={"COLUMNS": "160"})
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert "reward of the ground truth 1.0" in SHOWN
    assert [line for line in SHOWN.splitlines() if line != "..." and line not in printed] == []


def test_the_cluster_page_shows_what_plan_prints(monkeypatch: pytest.MonkeyPatch):
    page = (ROOT / "docs/get_started/cluster.md").read_text()
    ((command, shown),) = re.findall(r"^\$ megatron-bapo (plan .+)\n((?:.*\n)+?)```", page, re.MULTILINE)
    monkeypatch.chdir(ROOT)

    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "88"})
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert [line for line in shown.splitlines() if line != "..." and line not in printed] == []
