"""Every command in README.md and docs/ is one that the programs understand, on configurations that load."""

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from megatron_bapo.cli import app
from megatron_bapo.config.evaluation import EvalConfig
from megatron_bapo.config.loading import load_config, load_section

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM, TOOL, MAKE = "python -m megatron_bapo ", "python tools/", "make "


def commands(page: Path) -> list[str]:
    """From blocks of bash, and from code in the running text that starts like a command and has no placeholders."""
    text = page.read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    found = [*lines, *inline]
    shortened = [
        f"python -m megatron_bapo {each}" if re.match(r"(train|plan|eval) [^-\s]", each) else each for each in found
    ]
    wanted = [line.replace(".venv/bin/", "") for line in shortened]
    return [line for line in wanted if line.startswith((PROGRAM, TOOL, MAKE)) and "..." not in line]


COMMANDS = {f"{page.relative_to(ROOT)}: {line}": line for page in PAGES for line in commands(page)}


class Parsed(Exception):
    """The tool's arguments are accepted; it would start to work now."""


def check_program(arguments: list[str]) -> None:
    command = get_command(app)
    name, context, rest = command.resolve_command(typer.Context(command), arguments)  # pyright: ignore[reportAttributeAccessIssue]
    parameters = context.make_context(name, rest).params
    config = parameters.get("config")
    if config is None or not (ROOT / config).is_file():
        return
    if name == "eval":
        load_section(EvalConfig, ROOT / config, parameters["overrides"] or [])
    else:
        load_config(ROOT / config, parameters["overrides"] or [])


def check_tool(monkeypatch: pytest.MonkeyPatch, script: str, arguments: list[str]) -> None:
    if "argparse" not in (ROOT / script).read_text():
        assert arguments == []
        return
    for name in ("parse_args", "parse_intermixed_args"):
        parse = getattr(argparse.ArgumentParser, name)

        def parse_and_stop(parser: argparse.ArgumentParser, parse: Callable[..., Any] = parse) -> None:
            parse(parser)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parse_and_stop)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_in_the_docs_is_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = re.sub(r" N$", " 2", COMMANDS[name].split(" > ")[0])  # a number of the reader's
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in words[1:])
    elif words[1] == "-m":
        check_program(words[3:])
    else:
        check_tool(monkeypatch, words[1], words[2:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize(
    "command",
    [
        "train configs/quickstart.yaml optimizer.lrs=1",
        "eval configs/eval/paper.yaml trainer.total_steps=1",
        "plan x --gpus 8",
    ],
)
def test_a_command_with_a_mistake_would_be_found(command: str) -> None:
    with pytest.raises(Exception, match=r"unknown key|No such option"):
        check_program(command.split())
