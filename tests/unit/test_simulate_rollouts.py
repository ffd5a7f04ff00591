"""The command line of tools/simulate_rollouts.py, on recipes, and the page that shows it."""

import json
import os
import re
import shlex
import signal
import sys
import threading
from pathlib import Path

import pytest

from megatron_bapo.config.checks import planned_problems
from megatron_bapo.config.loading import load_config
from megatron_bapo.planning.known_models import architecture_of
from tests.unit.planning.examples import recipe
from tests.unit.test_tools import run

ROOT = Path(__file__).parents[2]
RECIPE = "configs/recipes/paper_32b_64k.yaml"
SMALL = ("trainer.train_batch_size=64", "trainer.ppo_mini_batch_size=64", "rollout.num_engines=1")
PAGE = (ROOT / "docs" / "guides" / "rollouts.md").read_text()
RUNS = re.findall(r"^\$ python tools/simulate_rollouts.py (.+)\n((?:.*\n)+?)```", PAGE, re.MULTILINE)
GRAPHS = PAGE.partition("## CUDA graphs\n")[2].partition("\n## ")[0]
EAGER = re.findall(r"^\| `(.+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", GRAPHS, re.MULTILINE)
SETTINGS = re.findall(r"^\| [^|`]+ \| (`.+`) \|", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_recipe_is_simulated_and_the_best_settings_are_named(monkeypatch, capsys):
    assert run(monkeypatch, "simulate_rollouts", RECIPE, *SMALL, "--steps", 2, "--json") == 0

    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert {"sync", "async 1", "async 8", "async 4, budget 8192"} <= set(found["settings"])
    fastest = max(result["steps_per_hour"] for result in found["settings"].values())
    assert found["settings"][found["best"]]["steps_per_hour"] >= 0.98 * fastest
    assert found["doubts"] == []
    assert captured.err.splitlines()[:2] == ["simulating sync (1 of 11) ...", "simulating async 1 (2 of 11) ..."]
    assert len(captured.err.splitlines()) == len(found["settings"]) == 11


@pytest.mark.parametrize("option", ["--and-run", "--overlapping-run"])
def test_runs_to_compare_with_need_a_run_to_start_from(monkeypatch, capsys, option):
    assert run(monkeypatch, "simulate_rollouts", RECIPE, option, "/nonexistent") == 2
    assert f"go with the directory of a recorded run, and {RECIPE} is none" in capsys.readouterr().err


@pytest.mark.parametrize("on_terminal", [False, True])
def test_ctrl_c_ends_it_with_one_line(monkeypatch, capsys, on_terminal):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_terminal)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    assert run(monkeypatch, "simulate_rollouts", RECIPE) == 130
    captured = capsys.readouterr()
    assert captured.err.endswith("stopped; nothing was written\n")
    assert "simulating sync" in captured.err
    assert ("\x1b[?25h" in captured.err) == on_terminal  # the bar gives the cursor back


@pytest.mark.parametrize(("command", "shown"), RUNS)
@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(monkeypatch, capsys, command, shown):
    assert run(monkeypatch, "simulate_rollouts", *shlex.split(command)) == 0

    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown.splitlines() if line != "..." and line not in printed] == []


@pytest.mark.parametrize("row", EAGER, ids=lambda row: row[0])
def test_the_page_shows_what_plan_says_of_cuda_graphs(row: tuple[str, ...]):
    plans = [recipe(row[0]), recipe(row[0], "rollout.enforce_eager=true")]
    planned = [plan.time.generation for plan in plans] + [plan.time.total for plan in plans]
    assert row[1:] == tuple(f"{seconds:.0f}" for seconds in planned)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_settings_on_the_page_are_accepted(settings: str):
    config = load_config(ROOT / RECIPE, settings.strip("`").split())

    assert planned_problems(config, *architecture_of(config.model)) == []


def test_the_page_has_runs_and_settings():
    assert (len(RUNS), len(EAGER), len(SETTINGS)) == (1, 2, 7)
