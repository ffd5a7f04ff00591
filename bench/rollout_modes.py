"""Time to train: asynchronous and partial rollouts against synchronous ones, real and simulated.

python -m bench.rollout_modes            # three runs of a small model whose answers end by chance, then 32B on paper
python -m bench.rollout_modes --on-paper

The real engine and the real trainer have a core each. The simulator is calibrated from synchronous runs alone,
and its prediction of the others is compared with what they took.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.report import report
from megatron_bapo.config.loading import load_config
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.rollout.calibration import planned_workload, recorded_workload
from megatron_bapo.rollout.simulation import best, candidates, simulate

NUM_STEPS = 13
NUM_FIRST_STEPS = 3
"""Not counted: they warm up, and fill the pipeline of `async`."""
CONFIG = f"""
model:
  dtype: float32
  create: {{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128, num_attention_heads: 2,
           num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 1024}}
data:
  chat_template: false
  max_prompt_length: 24
  train:
    reasoning_gym: {{chain_sum: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}}
    size: 60
reward: {{type: reasoning_gym}}
rollout: {{n: 4, max_response_length: 768}}
trainer: {{total_steps: {NUM_STEPS}, train_batch_size: 32, ppo_mini_batch_size: 16, ppo_epochs: 4,
          max_tokens_per_gpu: 2048}}
optimizer: {{lr: 1.0e-6}}
evaluation: {{every_steps: 0}}
checkpoint: {{every_steps: 1000}}
"""
MODES = {
    "sync": (),
    "async": ("rollout.mode=async", "rollout.max_staleness=2", "rollout.on_refresh=abort_and_resume"),
    "partial": (
        *("rollout.partial_rollout.token_budget=96", "rollout.partial_rollout.over_sampling=1.5"),
        "rollout.max_staleness=4",
    ),
}
LARGER = (
    "trainer.train_batch_size=96",
    "trainer.ppo_mini_batch_size=96",
    "trainer.ppo_epochs=1",
    "trainer.total_steps=7",
)
"""Another synchronous run, for the calibration alone: larger batches tell what a token costs."""
RUN_LIMIT_S = 900.0
RECIPE = Path(__file__).parents[1] / "configs" / "recipes" / "paper_32b_64k.yaml"
ON_PAPER = ("trainer.train_batch_size=512", "trainer.ppo_mini_batch_size=128", "rollout.gpu_memory_utilization=0.85")
MEAN_RESPONSE, SIGMA = 16_384, 1.0
"""Of answers of up to 64k tokens: a long tail."""


def _trained(folder: Path, name: str, overrides: Sequence[str]) -> list[float]:
    """Seconds of each step of a real run."""
    run_dir, config = folder / name, folder / "config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "megatron_bapo", "train", str(config), f"run_dir={run_dir}", *overrides]
    subprocess.run(command, check=True, timeout=RUN_LIMIT_S, stdout=subprocess.DEVNULL, cwd=folder)
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train"]
    return [row["metrics"]["timing_s/step"] for row in rows]


def compare(folder: Path, measured: dict[str, list[float]]) -> tuple[list[tuple[object, ...]], dict[str, float]]:
    """Measured seconds beside those that the simulator predicts, calibrated from synchronous runs; and their ratios."""
    _, workload = recorded_workload(folder / "sync", folder / "larger")
    rows, ratios = [], {}
    num = len(measured["sync"]) - NUM_FIRST_STEPS
    sync_s = sum(measured["sync"][NUM_FIRST_STEPS:])
    for name, steps in measured.items():
        settings = load_config(folder / name / "config.yaml", []).rollout
        seconds = sum(steps[NUM_FIRST_STEPS:])
        predicted = simulate(settings, workload, num_steps=num, num_first_steps=NUM_FIRST_STEPS).seconds
        rows.append((f"real, {name}", num, seconds, predicted, f"{predicted / seconds - 1:+.1%}", seconds / sync_s))
        ratios[f"prediction_{name}_to_measured"] = round(predicted / seconds, 3)
        if name != "sync":
            ratios[f"time_{name}_to_sync"] = round(seconds / sync_s, 3)
    return rows, ratios


def on_paper() -> tuple[list[tuple[object, ...]], dict[str, float]]:
    """32B with 64k answers on H100, engines apart from the trainer: seconds of 8 steps."""
    config = load_config(RECIPE, ON_PAPER)
    architecture, _ = architecture_of(config.model)
    plan = Plan(config, architecture, "H100", "separate", Assumptions())
    workload = planned_workload(plan, mean_response=MEAN_RESPONSE, sigma=SIGMA)
    results = {
        name: simulate(settings, workload, num_steps=8, num_first_steps=settings.max_staleness + 1)
        for name, settings in candidates(config.rollout).items()
    }
    sync_s, chosen = results["sync"].seconds, best(results)
    rows = [
        (f"32B, {name}", r.num_steps, "", r.seconds, "best" * (name == chosen), r.seconds / sync_s)
        for name, r in results.items()
    ]
    ratios = {
        f"32b_{name.replace(', ', '_').replace(' ', '_')}_to_sync": r.seconds / sync_s for name, r in results.items()
    }
    return rows, {name: round(ratio, 3) for name, ratio in ratios.items() if name != "32b_sync_to_sync"}


def main() -> None:
    rows, ratios = on_paper()
    if "--on-paper" not in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            _trained(folder, "larger", LARGER)
            real_rows, real_ratios = compare(folder, {name: _trained(folder, name, MODES[name]) for name in MODES})
        rows, ratios = real_rows + rows, real_ratios | ratios
    figures = {f"{row[0]} s".replace(" ", "_").replace(",", ""): round(float(row[2] or row[3]), 2) for row in rows}
    columns = ("run", "steps", "measured s", "simulated s", "", "time to sync")
    report("rollout_modes", columns, rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    main()
