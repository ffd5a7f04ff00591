"""A whole run on one GPU: the quickstart's model, and an engine that sleeps while the trainer trains beside it."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_bapo.metrics.sinks import read_rows
from tests.tolerances import BF16_ENGINE_LOG_PROB

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
OVERRIDES = (
    *("model.dtype=bfloat16", "parallel.world_size=1", "parallel.tensor_model_parallel_size=1"),
    # An easy task, so that some responses are right and the updates have a gradient.
    *("data.train.reasoning_gym.grid_walk.max_distance=1", "data.train.reasoning_gym.grid_walk.detours=0"),
    *("data.train.size=192", "data.validation=null", "warm_start.num_steps=30"),
    *("rollout.colocate=true", "rollout.sleep_level=2", "rollout.gpu_memory_utilization=0.2"),
    *("rollout.max_num_seqs=128", "weight_sync.transport=cuda_ipc"),
    *("trainer.total_steps=2", "trainer.train_batch_size=128", "trainer.ppo_mini_batch_size=64"),
)
LIMIT_S = 240


def test_engine_and_trainer_take_turns_on_one_gpu(tmp_path: Path, figures: Callable[..., None]) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "megatron_bapo", "train", str(QUICKSTART), f"run_dir={run_dir}", *OVERRIDES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (row["metrics"] for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train")
    figures(
        step_s=second["timing_s/step"],
        probe=second["weight_sync/probe_diff_rms"],
        sampled=first["training/rollout_probs_diff_max"],
        gradient_norm=first["actor/grad_norm"],
    )
    assert first["actor/grad_norm"] > 0
    assert second["weight_sync/probe_diff_rms"] < BF16_ENGINE_LOG_PROB
    assert second["training/policy_version"] > first["training/policy_version"]
