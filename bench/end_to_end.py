"""Seconds of a training step, ours against TRL's GRPO trainer: the same model, prompts, reward and batch.

python -m bench.end_to_end               # one run of each on two cores: half an hour
python -m bench.end_to_end --with-vllm   # also TRL with its vLLM backend

SmolLM2-135M-Instruct (`make smollm2`) in float32 answers word problems: 8 prompts x 8 responses of up to 128 tokens,
and two updates on each batch. Ours is configs/smollm2_135m_cpu.yaml with these prompts and lengths. Its updates leave
out responses to prompts with equal rewards, which add nothing to the gradients; a second run of ours trains on all
responses, as TRL does, and the table has the share of such prompts. TRL runs with its defaults but for gradient
checkpointing, which slows it down, and with as many threads as there are cores. Responses are sampled, so their mean
lengths differ a little; the table has them. The first step, which fills caches, does not count. Processor seconds, of
engines and of updates, compare them also on a machine that other work uses. Needs build/bench-site on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from bench.report import option_parser, report
from megatron_bapo.data.reasoning_gym_tasks import generate_entries
from megatron_bapo.metrics.sinks import read_rows

ROOT = Path(__file__).parents[1]
CONFIG, MODEL = ROOT / "configs" / "smollm2_135m_cpu.yaml", ROOT / "models" / "smollm2-135m-instruct"
TASK: dict[str, dict[str, Any]] = {"gsm_symbolic": {}}
NUM_PROMPTS, NUM_GENERATIONS, MINI_BATCH_SIZE, MAX_RESPONSE_LENGTH, LR, SEED = 8, 8, 32, 128, 2e-6, 1
BATCH_SIZE = NUM_PROMPTS * NUM_GENERATIONS
MAX_TOKENS_PER_GPU = 1024  # two ranks and two engines then fit in 24 GB
NUM_FIRST_STEPS = 1
RUN_LIMIT_S = 3600.0
ALL_TRAINED = "ours, all trained"


@dataclass(frozen=True)
class Steps:
    """The steps of one run."""

    seconds: Sequence[float]
    mean_length: float
    """Mean number of tokens of a response."""
    cpu_s: float | None
    """Mean processor seconds of a step, where they are known."""
    parts: Mapping[str, float]
    """Mean seconds of a step's parts, where they are known."""
    uniform_groups: float | None = None
    """Mean share of prompts whose responses have equal rewards, where it is known."""

    @property
    def mean_s(self) -> float:
        return mean(self.seconds)


def write_prompts(folder: Path, num_steps: int) -> Path:
    """Write as many prompts as the steps need, one for each line."""
    entries = generate_entries(TASK, size=NUM_PROMPTS * num_steps, seed=SEED)
    rows = [{"prompt": entry["question"], "answer": entry["answer"]} for _, entry in entries]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ours(folder: Path, prompts: Path, num_steps: int, name: str, changes: Sequence[str]) -> Steps:
    run_dir = folder / name
    overrides = (
        *(f"run_dir={run_dir}", f"model.path={MODEL}", f"seed={SEED}", f"optimizer.lr={LR}"),
        *("data.train.reasoning_gym=null", "data.train.size=null", "data.train.seed=null"),
        *(
            f"data.train.path={prompts}",
            "data.validation=null",
            "data.system_prompt=null",
            "data.max_prompt_length=256",
        ),
        *(f"rollout.n={NUM_GENERATIONS}", f"rollout.max_response_length={MAX_RESPONSE_LENGTH}"),
        *(
            f"trainer.train_batch_size={BATCH_SIZE}",
            f"trainer.ppo_mini_batch_size={MINI_BATCH_SIZE}",
            f"trainer.max_tokens_per_gpu={MAX_TOKENS_PER_GPU}",
        ),
        f"trainer.total_steps={num_steps}",
    )
    command = [sys.executable, "-m", "megatron_bapo", "train", str(CONFIG), *overrides, *changes]
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(command, check=True, timeout=RUN_LIMIT_S, stdout=log, stderr=log, cwd=folder)
    rows = [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train"]
    rows = rows[NUM_FIRST_STEPS:]
    parts = {name: mean(row[f"timing_s/{name}"] for row in rows) for name in ("generate", "update", "weight_sync")}
    cpu_s = mean(row["perf/cpu_s/rollouts"] + row["perf/cpu_s/update"] for row in rows)
    lengths = [row["response_length/mean"] for row in rows]
    uniform = mean(row["training/uniform_groups"] for row in rows)
    return Steps([row["timing_s/step"] for row in rows], mean(lengths), cpu_s, parts, uniform)


def trl(folder: Path, prompts: Path, num_steps: int, *, use_vllm: bool) -> Steps:
    job = {
        "model": str(MODEL),
        "prompts": str(prompts),
        "num_steps": num_steps,
        "num_cores": len(os.sched_getaffinity(0)),
        "num_generations": NUM_GENERATIONS,
        "batch_size": BATCH_SIZE,
        "mini_batch_size": MINI_BATCH_SIZE,
        "max_response_length": MAX_RESPONSE_LENGTH,
        "lr": LR,
        "seed": SEED,
        "use_vllm": use_vllm,
    }
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "bench.trl_grpo", str(folder / "job.json"), str(folder / "results.json")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["num_cores"])}
    with (folder / "trl.log").open("w") as log:
        subprocess.run(command, check=True, timeout=RUN_LIMIT_S, stdout=log, stderr=log, env=environment, cwd=ROOT)
    found = json.loads((folder / "results.json").read_text())
    cpu_s = None if use_vllm else mean(found["step_cpu_s"][NUM_FIRST_STEPS:])  # vLLM has processes of its own
    lengths = found["mean_length"][NUM_FIRST_STEPS:]
    return Steps(found["step_s"][NUM_FIRST_STEPS:], mean(lengths), cpu_s, {})


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--steps", type=int, default=4, help="steps of each run (default: %(default)s)")
    parser.add_argument("--with-vllm", action="store_true", help="also TRL with its vLLM backend")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="an empty folder for the runs")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="overrides of our configuration")
    arguments = parser.parse_intermixed_args()
    if not MODEL.exists():
        raise SystemExit(f"{MODEL} does not exist; `make smollm2` writes it")
    figures: dict[str, float] = {"others_cpu_percent_at_start": psutil.cpu_percent(2.0)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.runs or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        prompts = write_prompts(folder, arguments.steps)
        runs = dict[str, Steps]()
        for name, more in {"ours": [], ALL_TRAINED: ["trainer.skip_zero_advantage=false"]}.items():
            runs[name] = ours(folder, prompts, arguments.steps, _key(name), [*more, *arguments.changes])
            print(f"{name}: {runs[name].mean_s:.1f} s a step", flush=True)
        runs["TRL"] = trl(folder, prompts, arguments.steps, use_vllm=False)
        if arguments.with_vllm:
            runs["TRL with vLLM"] = trl(folder, prompts, arguments.steps, use_vllm=True)
    rows = [
        (
            name,
            run.mean_s,
            run.cpu_s or "",
            run.mean_length,
            "" if run.uniform_groups is None else run.uniform_groups,
            *(run.parts.get(part, "") for part in ("generate", "update", "weight_sync")),
            run.mean_s / runs["ours"].mean_s,
        )
        for name, run in runs.items()
    ]
    ratios = {
        f"{_key(name)}_to_{_key(own)}": round(run.mean_s / runs[own].mean_s, 3)
        for name, run in runs.items()
        for own in ("ours", ALL_TRAINED)
        if name.startswith("TRL")
    }
    for name, run in runs.items():
        figures |= {f"{_key(name)}_step_s": round(run.mean_s, 2), f"{_key(name)}_cpu_s": round(run.cpu_s or 0.0, 1)}
        figures |= {f"{_key(name)}_response_tokens": round(run.mean_length, 1)}
    figures |= {f"ours_{part}_s": round(seconds, 2) for part, seconds in runs["ours"].parts.items()}
    figures["ours_uniform_groups"] = round(runs["ours"].uniform_groups or 0.0, 3)
    lengths = "tokens a response", "uniform groups"
    header = ("trainer", "s/step", "CPU s/step", *lengths, "generate", "update", "weights", "to ours")
    report("end_to_end", header, rows, ratios=ratios, figures=figures)


def _key(name: str) -> str:
    return name.lower().replace(",", "").replace(" ", "_")


if __name__ == "__main__":
    main()
