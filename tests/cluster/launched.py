"""The run that tests/cluster start with the scripts in launch/, and functions that watch its steps."""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path

from megatron_bapo.metrics.sinks import read_rows
from tests.e2e.test_training import CONFIG as SMALLEST

# Null values remove settings of the smallest run of tests/e2e.
CONFIG = """
extends: smallest.yaml
data: {validation: null}
warm_start: null
trainer: {total_steps: 100000, train_batch_size: 16, ppo_mini_batch_size: 8}
checkpoint: {every_steps: 5}
weight_sync: {full_every: 2}
logging: {dump_rollouts: null}
"""
LAUNCH = Path(__file__).parents[2] / "launch"
START_LIMIT_S = 600
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(LAUNCH.parent),
    "BAPO_PYTHON": sys.executable,
    "BAPO_OBJECT_STORE_BYTES": str(100 << 20),
    "BAPO_HEAD_TIMEOUT_S": "6",
    # By default Ray takes a minute to declare an unreachable host dead.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}


def write_config(folder: Path, run_dir: Path) -> Path:
    (folder / "smallest.yaml").write_text(SMALLEST.format(run_dir=run_dir))
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    return config


def write_token(folder: Path) -> Path:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return token


def train_steps(run_dir: Path) -> list[int]:
    metrics = run_dir / "metrics.jsonl"
    return [row["step"] for row in read_rows(metrics)] if metrics.exists() else []


def wait_for_step(run_dir: Path, step: int, logs: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while step not in train_steps(run_dir):
        if time.monotonic() > deadline:
            tails = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in logs.rglob("*.log"))
            raise AssertionError(f"step {step} did not finish in time\n{tails}")
        time.sleep(0.2)
