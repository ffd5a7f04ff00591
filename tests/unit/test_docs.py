"""Every command in README.md, docs/ and the help texts is understood, and checks a configuration that loads."""

import argparse
import ast
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from megatron_bapo.cli.main import app
from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.config.checks import FREE_ON_RESUME, check_config
from megatron_bapo.config.cluster import ClusterConfig, ContainerConfig, NodesConfig
from megatron_bapo.config.evaluation import EvalConfig
from megatron_bapo.config.loading import load_config, load_section
from megatron_bapo.config.schema import Config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAM, TOOL, MAKE = "megatron-bapo ", "python tools/", "make "
"""How commands of ours begin, after `python -m megatron_bapo` has been written as the first."""
SUBCOMMANDS: dict[str, Any] = get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]


def commands(page: Path) -> list[str]:
    """From blocks of bash, after a prompt in other blocks, and from code in the running text without placeholders."""
    text = page.read_text()
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    joined = [(language, block.replace("\\\n", " ").splitlines()) for language, block in blocks]
    typed = [line for language, lines in joined for line in lines if language == "bash"]
    prompted = [line.removeprefix("$ ") for _, lines in joined for line in lines if line.startswith("$ ")]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    mentions = {PROGRAM + name for name in SUBCOMMANDS}
    inline = [line for line in inline if full(line) not in mentions]
    return [line for line in map(full, [*typed, *prompted, *inline]) if is_ours(line)]


def full(line: str) -> str:
    """As one types it; `train CONFIG` in the running text leaves out the program."""
    line = line.strip().replace(".venv/bin/", "").replace("python -m megatron_bapo ", PROGRAM)
    return PROGRAM + line if re.match(rf"({'|'.join(SUBCOMMANDS)}) [^-\s]", line) else line


def is_ours(line: str) -> bool:
    return line.startswith((PROGRAM, TOOL, MAKE)) and "..." not in line and not line.startswith(f"{PROGRAM}COMMAND")


def examples(name: str) -> list[str]:
    """The commands in the last lines of `megatron-bapo NAME --help`."""
    epilog = (SUBCOMMANDS[name].epilog or "").replace("\\\n", "")  # a command may go on in the next line
    return re.findall(r"\[bold\](.*?)\[/\]", epilog)


COMMANDS = {line: f"{name} --help" for name in SUBCOMMANDS for line in examples(name)}
COMMANDS |= {line: str(page.relative_to(ROOT)) for page in reversed(PAGES) for line in commands(page)}
"""The first page that each is on."""


class Parsed(Exception):
    """The tool's arguments are accepted; it would start to work now."""


def check_program(arguments: list[str]) -> None:
    """Parse the command; then have it check its configuration, or print its help where it has none."""
    command = get_command(app)
    name, context, rest = command.resolve_command(typer.Context(command), arguments)  # pyright: ignore[reportAttributeAccessIssue]
    parameters = context.make_context(name, rest).params
    config, overrides = parameters.get("config"), parameters.get("overrides") or []
    if config is None or not Path(config).is_file():
        run([name, "--help"])
    elif name == "plan":
        load_config(config, overrides)
        if not parameters["ranked"]:  # a search takes long
            run(arguments, or_says="does not fit on")
    elif name == "submit":
        run([*arguments, *["--dry-run"] * (not parameters["dry_run"])])
    elif has_inputs(loaded := load_section(EvalConfig if name == "eval" else Config, config, overrides), parameters):
        few_prompts = ["data.train.size=512"] if name == "train" and loaded.data.train.reasoning_gym else []
        run([*arguments, *few_prompts, *["--dry-run"] * (not parameters["dry_run"])])


def has_inputs(config: Config | EvalConfig, parameters: dict[str, Any]) -> bool:
    """Whether the model, the teacher, the prompts and the recorded rollouts are on this machine."""
    sources = (config.data.validation, getattr(config.data, "train", None))
    paths = [config.model.path, *(source.path for source in sources if source is not None)]
    paths.append(parameters.get("rollouts_from"))
    if isinstance(config, Config) and config.algorithm.distillation is not None:
        paths.append(config.algorithm.distillation.teacher)
    return all(path.exists() for path in paths if path is not None)


def run(arguments: list[str], *, or_says: str | None = None) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 or (or_says and or_says in result.output), result.output


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


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory like a fresh checkout's: without runs, models and data of this machine."""
    for path in ROOT.iterdir():
        if path.name not in ("runs", "models", "data"):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("checkout")
@pytest.mark.parametrize("line", COMMANDS, ids=[f"{page}: {line}" for line, page in COMMANDS.items()])
def test_a_documented_command_runs(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = re.sub(r" N$", " 2", line.split(" > ")[0])  # a number of the reader's
    words = shlex.split(line, comments=True)
    assert is_ours(line), "an example in a help text can be pasted"
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in targets)
    elif words[0] == "megatron-bapo":
        run(words[1:]) if words[1].startswith("-") else check_program(words[1:])
    else:
        check_tool(monkeypatch, words[1], words[2:])


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings; `make docs` looks at those of the site."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]
    broken = []
    for link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """From the repository's folders, or modules from the package's; words in capitals stand for a name."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = [name for name in re.findall(r"`([a-z]\w*/[\w./-]+)`", text) if not re.search("[A-Z]{3,}", name)]
    top = ("megatron_bapo", "bench", "configs", "docs", "launch", "tests", "tools")
    packages = {path.parent.name for path in (ROOT / "megatron_bapo").glob("*/__init__.py")}
    paths = [ROOT / name for name in named if name.startswith(tuple(f"{folder}/" for folder in top))]
    paths += [ROOT / "megatron_bapo" / n for n in named if n.partition("/")[0] in packages and n.endswith(".py")]
    assert [path for path in paths if not path.exists()] == []


def test_the_folders_of_the_package_are_listed() -> None:
    page = (
        (ROOT / "docs/contributing/index.md").read_text().partition("## Where a change goes")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    packages = {path.parent.name for path in (ROOT / "megatron_bapo").glob("*/__init__.py")}
    modules = {path.name for path in (ROOT / "megatron_bapo").glob("*.py")} - {"__init__.py", "__main__.py"}

    assert {name for row in rows for name in re.findall(r"`(\w+)/`", row)} == packages
    assert set(re.findall(r"`(\w+\.py)`", page)) == modules


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


ALGORITHMS = ROOT / "docs/algorithms"
METHODS = re.findall(r"^\| [^|]+ \| ([^|]+) \| `(\w+\.yaml)` \|", (ALGORITHMS / "index.md").read_text(), re.MULTILINE)


def keys_of(file: str) -> dict[str, Any]:
    """Return the keys that a file in configs/objectives sets; null takes away what the quickstart sets."""
    content = yaml.safe_load((ROOT / "configs/objectives" / file).read_text())
    content["algorithm"] = {key: value for key, value in content["algorithm"].items() if value is not None}
    return content


@pytest.mark.parametrize(("keys", "file"), METHODS, ids=[file for _, file in METHODS])
def test_a_row_of_the_methods_table_has_the_keys_of_its_file(keys: str, file: str) -> None:
    content = keys_of(file)
    row = yaml.safe_load("{" + ", ".join(re.findall(r"`([^`]+: [^`]+)`", keys)) + "}")

    assert row == content["algorithm"] | {f"rollout.{key}": value for key, value in content.get("rollout", {}).items()}
    assert check_config(load_config(ROOT / "configs/objectives" / file)) == []


def test_every_file_of_a_method_has_a_row() -> None:
    assert {file for _, file in METHODS} == {path.name for path in (ROOT / "configs/objectives").iterdir()}


def test_the_targets_of_make_are_listed() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    page = (ROOT / "docs/reference/command_line.md").read_text()
    internal = {"lint", "suite", "types", "unit-fast"}
    assert set(re.findall(r"^\| `make ([\w-]+)` \|", page, re.MULTILINE)) == set(targets.split()) - internal


def keys_on(page: Path) -> list[dict[str, Any]]:
    """Its blocks of YAML."""
    return [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize("file", [file for _, file in METHODS])
def test_the_page_of_a_method_shows_the_keys_of_its_file(file: str) -> None:
    content = keys_of(file)
    del content["extends"], content["run_dir"]
    assert content in keys_on(ALGORITHMS / f"{'decoupled' if file.startswith('decoupled') else Path(file).stem}.md")


def test_the_page_of_bapo_shows_every_key_with_its_default() -> None:
    (shown,) = keys_on(ALGORITHMS / "bapo.md")
    assert shown["algorithm"]["clip_bounds"] == AlgorithmConfig().clip_bounds.model_dump()
    assert shown["algorithm"]["objective"] == AlgorithmConfig().objective


@pytest.mark.parametrize("page", sorted(ALGORITHMS.iterdir()), ids=lambda page: page.name)
def test_the_metrics_that_an_algorithm_page_names_exist(page: Path) -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    sections = {row.partition("/")[0] for row in rows}
    named = re.findall(r"`((\w+)/[\w/]+)`", page.read_text())
    assert {name for name, section in named if section in sections} - set(rows) == set()


def test_the_commands_and_their_options_are_listed() -> None:
    page = (ROOT / "docs/reference/command_line.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    listed = {name: set(re.findall(r"^\| `(--[\w-]+)", sections.get(name, ""), re.MULTILINE)) for name in SUBCOMMANDS}
    options = {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        for name, command in SUBCOMMANDS.items()
    }
    assert SUBCOMMANDS.keys() <= sections.keys()
    assert listed == options


def test_the_defaults_of_options_are_listed() -> None:
    page = (ROOT / "docs/reference/command_line.md").read_text()
    rows = dict(re.findall(r"^\| `(--[\w-]+)[^|]*\| `([^`|]+)` \|", page, re.MULTILINE))
    parameters = {option: p for command in SUBCOMMANDS.values() for p in command.params for option in p.opts}
    defaults = {option: parameters[option].default for option in rows.keys() & parameters.keys()}
    shown = {option: f"{value:g}" if isinstance(value, float) else str(value) for option, value in defaults.items()}
    assert len(shown) > 5
    assert shown.items() <= rows.items()


def test_the_keys_that_a_continued_run_may_change_are_listed() -> None:
    page = (ROOT / "docs/reliability/troubleshooting.md").read_text().partition("## What a continued run may change")[2]
    rows = re.findall(r"^\| (\S.*) \| (`.*`) \|$", page, re.MULTILINE)
    sections = {section.strip("`"): re.findall(r"`(\w+)`", keys) for section, keys in rows}
    whole = sections.pop("whole sections")

    listed = [*whole, *(f"{section}.{key}" for section, keys in sections.items() for key in keys)]
    assert sorted(listed) == sorted(FREE_ON_RESUME)


def test_the_keys_of_a_cluster_file_are_listed() -> None:
    page = (ROOT / "docs/guides/clusters.md").read_text().partition("### A cluster file")[2]
    rows = dict(re.findall(r"^\| (`[\w`, ]+`) \| ([^|]+) \|", page, re.MULTILINE))
    inner = {name: set(re.findall(r"\w+", kind)) for name, kind in rows.items() if kind.startswith("`{")}

    assert {key for names in rows for key in re.findall(r"\w+", names)} == ClusterConfig.model_fields.keys()
    assert inner == {
        "`rollout_nodes`": NodesConfig.model_fields.keys(),
        "`container`": ContainerConfig.model_fields.keys(),
    }


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def texts(module: ast.Module) -> list[str]:
    """Literals, with * for what formatted ones leave open."""
    formatted = [node for node in ast.walk(module) if isinstance(node, ast.JoinedStr)]
    parts = {id(value) for node in formatted for value in node.values}
    plain = [node.value for node in ast.walk(module) if isinstance(node, ast.Constant) and id(node) not in parts]
    filled = ["".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in node.values) for node in formatted]
    return [text for text in [*plain, *filled] if isinstance(text, str)]


def matches(name: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".+"), name) is not None


def test_every_metric_is_on_its_page_and_no_other() -> None:
    """What modules that make metrics write with a slash is the name of one."""
    sources = [path.read_text() for path in (ROOT / "megatron_bapo").rglob("*.py")]
    makers = [ast.parse(source) for source in sources if "megatron_bapo.metrics.values import" in source]
    written = {text for module in makers for text in texts(module) if re.fullmatch(r"[a-z_]+/[\w*@/]*", text)}
    names = {f"{text}*" if text.endswith("/") else text for text in written}
    page = (ROOT / "docs/reference/metrics.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    listed = [re.sub(r"\b[A-Z]+\b|(?<=_)N\b", "*", row) for row in rows]

    assert len(names) > 80
    assert {name for name in names if not any(matches(row, name) for row in listed)} == set()
    assert {row for row in listed if not any(matches(row, name) for name in names)} == set()
