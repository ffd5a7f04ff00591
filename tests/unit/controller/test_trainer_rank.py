"""A trainer rank imports only what it needs."""

import subprocess
import sys

import pytest

UNUSED = ("matplotlib", "mlflow", "pandas", "transformers", "vllm", "wandb")
"""Packages that take a second or more to import, in each rank and after each restart."""


@pytest.mark.slow
def test_a_trainer_rank_does_not_import_packages_that_it_may_not_need() -> None:
    code = "import sys, megatron_bapo.controller.trainer_rank; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert {name for name in UNUSED if name in done.stdout.split()} == set()
