"""Time to train: asynchronous and partial rollouts against synchronous ones, real and simulated.

python -m bench.rollout_modes            # real runs on two cores, then a simulation of 32B: 7 minutes
python -m bench.rollout_modes --on-paper # only the simulation of 32B
python -m bench.rollout_modes --runs DIR # keep the run directories
python -m bench.rollout_modes rollout.n=8 rollout.max_response_length=512 # other real runs

The real runs use the real engine, scheduler and trainer. The model is untrained and learns almost nothing, so a
response ends after each token with the probability of one token of the vocabulary. Lengths are therefore geometric, and
the longest of a batch is four times the mean. The length limit truncates one response in a hundred.

The simulator is calibrated from two synchronous runs and one less asynchronous run, and predicts the step times of the
other modes before they run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from bench.report import option_parser, report
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.rollout import RolloutConfig
from megatron_bapo.config.schema import Config
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.simulation.calibration import (
    overlapping_run,
    planned_workload,
    recorded_run,
    recorded_workload,
    with_overlap,
)
from megatron_bapo.simulation.simulator import Workload, best, candidates, simulate

NUM_STEPS = 14
NUM_FIRST_STEPS = 3
"""First steps that do not count: they warm up and fill the pipeline of `async`."""
NUM_SIMULATIONS = 8
"""Number of simulations, enough to average out the sampled lengths."""
CONFIG = f"""
model:
  dtype: float32
  create: {{num_hidden_layers: 2, hidden_size: 64, intermediate_size: 128, num_attention_heads: 2,
           num_key_value_heads: 2, head_dim: 32, max_position_embeddings: 2048}}
data:
  chat_template: false
  max_prompt_length: 24
  train:
    reasoning_gym: {{chain_sum: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}}}}
    size: 60
reward: {{type: reasoning_gym}}
rollout: {{n: 4, max_response_length: 1536}}
trainer: {{total_steps: {NUM_STEPS}, train_batch_size: 32, ppo_mini_batch_size: 16, ppo_epochs: 4,
          max_tokens_per_gpu: 2048}}
optimizer: {{lr: 1.0e-6}}
evaluation: {{every_steps: 0}}
checkpoint: {{every_steps: 1000}}
logging: {{tensorboard: false}}
"""
LARGER, LARGER_BY, NUM_LARGER_STEPS = "sync, larger batches", 2, 6
"""Run for calibration only, with more concurrent responses, as in `async`."""
OVERLAPPING = (
    *("rollout.mode=async", "rollout.max_staleness=1", "rollout.on_weight_update=abort_and_resume"),
    "trainer.total_steps=12",
)
"""Run for calibration only, to measure how much engines and trainer slow each other down."""
OTHERS = {
    "async": ("rollout.mode=async", "rollout.max_staleness=2", "rollout.on_weight_update=abort_and_resume"),
    "partial": (
        *("rollout.partial_rollout.token_budget=192", "rollout.partial_rollout.over_sampling=1.5"),
        "rollout.max_staleness=4",
    ),
}
RUN_LIMIT_S = 900.0
RECIPE = Path(__file__).parents[1] / "configs" / "recipes" / "paper_32b_64k.yaml"
ON_PAPER = ("trainer.train_batch_size=512", "trainer.ppo_mini_batch_size=128")
MEAN_RESPONSE, SIGMA = 16_384, 1.0
"""Parameters of a long-tailed distribution of response lengths of up to 64k tokens."""


def trained(folder: Path, name: str, overrides: Sequence[str]) -> Path:
    """Execute a real run and return its directory."""
    run_dir, config = folder / name.replace(", ", "-").replace(" ", "-"), folder / "config.yaml"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "megatron_bapo", "train", str(config), f"run_dir={run_dir}", *overrides]
    subprocess.run(command, check=True, timeout=RUN_LIMIT_S, stdout=subprocess.DEVNULL, cwd=folder)
    return run_dir


def step_s(run_dir: Path) -> float:
    """Return the mean seconds of a step, without the first ones."""
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train"]
    seconds = [row["metrics"]["timing_s/step"] for row in rows if row["step"] > NUM_FIRST_STEPS]
    return sum(seconds) / len(seconds)


def simulated_step_s(settings: RolloutConfig, workload: Workload) -> float:
    """Return the mean seconds of a step in simulations of the same steps."""
    num_steps = NUM_STEPS - NUM_FIRST_STEPS
    runs = [
        simulate(settings, workload, num_steps=num_steps, num_first_steps=NUM_FIRST_STEPS, seed=seed)
        for seed in range(NUM_SIMULATIONS)
    ]
    return sum(run.seconds for run in runs) / (num_steps * NUM_SIMULATIONS)


def larger_batches(config: Config) -> tuple[str, ...]:
    """Return the overrides for larger batches with one update each."""
    size = LARGER_BY * config.trainer.train_batch_size
    return (
        *(f"trainer.train_batch_size={size}", f"trainer.ppo_mini_batch_size={size}", "trainer.ppo_epochs=1"),
        f"trainer.total_steps={NUM_LARGER_STEPS}",
    )


def on_two_cores(folder: Path, changes: Sequence[str]) -> tuple[list[tuple[object, ...]], dict[str, float]]:
    """Return the predicted and measured seconds of a step in every mode, and their ratios.

    Each mode is predicted before it runs, from two synchronous runs and an asynchronous run with other settings.
    """
    sync = recorded_run(trained(folder, "sync", changes))
    larger = recorded_run(trained(folder, LARGER, (*changes, *larger_batches(sync.config))))
    overlapping = overlapping_run(trained(folder, "overlapping", (*changes, *OVERLAPPING)))
    workload = with_overlap(recorded_workload(sync, larger)[0], overlapping)
    print(f"{workload.num_cores:.2f} cores for engines and trainer together", flush=True)
    rows: list[tuple[object, ...]] = []
    ratios, sync_s = {}, 0.0
    for name, mode in {"sync": (), **OTHERS}.items():
        overrides = (*changes, *mode)
        settings = load_config(folder / "config.yaml", [f"run_dir={folder}", *overrides]).rollout
        predicted_s = simulated_step_s(settings, workload)
        print(f"{name}: predicted {predicted_s:.2f} s per step", flush=True)
        measured_s = step_s(sync.folder if name == "sync" else trained(folder, name, overrides))
        sync_s = sync_s or measured_s
        rows.append((f"2 cores, {name}", measured_s, predicted_s, measured_s / sync_s, ""))
        ratios[f"{_key(name)}_predicted_to_measured"] = round(predicted_s / measured_s, 3)
        if name != "sync":
            ratios[f"{_key(name)}_to_sync"] = round(measured_s / sync_s, 3)
    return rows, ratios


def on_paper() -> tuple[list[tuple[object, ...]], dict[str, float]]:
    """Return the simulated seconds of a step of 32B with 64k responses on H100 and separate engines, and ratios."""
    config = load_config(RECIPE, ON_PAPER)
    architecture, _ = architecture_of(config.model)
    plan = Plan(config, architecture, "H100", Assumptions())
    workload = planned_workload(plan, mean_response=MEAN_RESPONSE, sigma=SIGMA)
    results = {
        name: simulate(settings, workload, num_steps=5, num_first_steps=settings.max_staleness + 1)
        for name, settings in candidates(config.rollout).items()
    }
    sync_s, chosen = results["sync"].seconds, best(results)
    rows: list[tuple[object, ...]] = [
        (f"32B, {name}", "", r.seconds / r.num_steps, r.seconds / sync_s, "the best" * (name == chosen))
        for name, r in results.items()
    ]
    return rows, {
        f"32b_{_key(name)}_to_sync": round(r.seconds / sync_s, 3) for name, r in results.items() if name != "sync"
    }


def _key(name: str) -> str:
    return name.replace(", ", "_").replace(" ", "_")


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--on-paper", action="store_true", help="only simulate 32B")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="an empty folder for the run directories")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="overrides of the real runs' configuration")
    arguments = parser.parse_intermixed_args()
    figures = {"others_cpu_percent_at_start": psutil.cpu_percent(2.0)}
    rows, ratios = on_paper()
    if not arguments.on_paper:
        with ExitStack() as stack:
            folder = arguments.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            real_rows, real_ratios = on_two_cores(folder.absolute(), arguments.changes)
        rows, ratios = real_rows + rows, real_ratios | ratios
    figures |= {f"{_key(str(row[0]))}_s": round(float(str(row[1] or row[2])), 2) for row in rows}
    report("rollout_modes", ("run", "s/step", "simulated", "to sync", ""), rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    main()
