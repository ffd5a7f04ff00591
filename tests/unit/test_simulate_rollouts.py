"""The command of `tools/`, on a recipe."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ("trainer.train_batch_size=64", "trainer.ppo_mini_batch_size=64", "rollout.num_engines=1")


def simulated(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/simulate_rollouts.py", "configs/recipes/paper_32b_64k.yaml", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_recipe_is_simulated_and_the_best_settings_are_named():
    done = simulated(*SMALL, "--steps", "2", "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"sync", "async 1", "async 8", "async 4, budget 8192"} <= set(found["settings"])
    fastest = max(result["steps_per_hour"] for result in found["settings"].values())
    assert found["settings"][found["best"]]["steps_per_hour"] >= 0.98 * fastest
