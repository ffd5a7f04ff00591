import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_bapo.cli.main import app
from tests.unit.planning.examples import recipe

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "guides" / "layouts.md").read_text()
RUNS = re.findall(r"^\$ megatron-bapo (plan .+)\n((?:.*\n)+?)```", PAGE, re.MULTILINE)
ROWS = re.findall(r"^\| (none|`.+=.+`).* \| (.+) \| (.+) \| (.+) \| ([\d.]+)(.*) \| (.+) \|$", PAGE, re.MULTILINE)
GIB = 2**30


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), RUNS)
def test_the_page_shows_what_the_command_prints(command: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "88"})
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert [line for line in shown.splitlines() if line != "..." and line not in printed] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_pages_table_holds_the_plans_numbers(row: tuple[str, ...]) -> None:
    overrides, held, optimizer, activations, training, verdict, seconds = row
    plan = recipe("r1-distill-qwen-7b_8gpus", *([] if overrides == "none" else overrides.strip("`").split()))
    stage = plan.worst_stage
    assert float(held) == round((stage.state.parameters + stage.state.gradients) / GIB, 1)
    assert float(optimizer) == round(stage.state.optimizer / GIB, 1)
    assert float(activations) == round(sum(stage.activations.values()) / GIB, 1)
    assert float(training) == round(plan.while_training(stage) / GIB, 1)
    assert float(seconds) == round(plan.time.training)
    assert plan.fits == (not verdict)


def test_the_page_has_runs_and_rows() -> None:
    assert (len(RUNS), len(ROWS)) == (4, 9)
