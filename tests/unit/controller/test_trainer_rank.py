"""A trainer rank imports only what it needs, and ends with torchrun."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import is_running

UNUSED = ("matplotlib", "mlflow", "pandas", "transformers", "vllm", "wandb")
"""Packages that take a second or more to import, in each rank and after each restart."""


@pytest.mark.slow
def test_a_trainer_rank_does_not_import_packages_that_it_may_not_need() -> None:
    code = "import sys, megatron_bapo.controller.trainer_rank; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert {name for name in UNUSED if name in done.stdout.split()} == set()


NEVER_IMPORTED = """
import os, pathlib, time
part = pathlib.Path(os.environ["RANK_FILE"]).with_suffix(".part")
part.write_text(str(os.getpid()))
part.rename(os.environ["RANK_FILE"])
time.sleep(60)
"""
TORCHRUN = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "megatron_bapo.controller.trainer_rank"])
"""


def wait_until(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_trainer_rank_ends_with_torchrun_while_it_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(NEVER_IMPORTED)
    path, rank = f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}", tmp_path / "rank"
    environment = {**os.environ, "PYTHONPATH": path, "RANK_FILE": str(rank)}
    with subprocess.Popen([sys.executable, "-c", TORCHRUN], env=environment) as torchrun:
        wait_until(rank.exists, 50.0)
        torchrun.kill()
    wait_until(lambda: not is_running(int(rank.read_text())), 10.0)
