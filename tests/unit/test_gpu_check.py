"""What a machine without a GPU can tell about the GPU checks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bapo.config.loading import load_config
from tests.gpu.conftest import ORDER
from tests.gpu.test_colocated_run import OVERRIDES, QUICKSTART

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.slow
def test_without_a_gpu_the_gpu_checks_say_so_and_succeed_only_when_that_is_fine(accepted: bool) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_GPU_IS_FINE": str(int(accepted))}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "no GPU found: none of the GPU checks ran" in done.stdout + done.stderr
    assert (done.returncode == 0) == accepted


def test_the_page_lists_the_files_in_the_order_in_which_they_run() -> None:
    page = (ROOT / "docs" / "reliability" / "gpu_checks.md").read_text()
    table = page.partition("## What the checks cover")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `test_(\w+)\.py`", table, re.M)) == ORDER
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")} == set(ORDER)


def test_the_colocated_run_has_a_valid_configuration() -> None:
    config = load_config(QUICKSTART, OVERRIDES)
    assert config.rollout.colocate
    assert config.rollout.sleep_level > 0
    assert config.trainer.train_batch_size == 2 * config.trainer.ppo_mini_batch_size


def test_a_checkout_travels_in_64_mib() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sum((ROOT / name).lstat().st_size for name in tracked.split("\0") if (ROOT / name).is_file()) < 64 << 20
