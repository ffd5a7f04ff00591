"""Run directories with metrics and records of 60 steps, without a model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bapo.metrics.sinks import JsonlSink, MetricsRow
from megatron_bapo.run_directory import RunDirectory

START_S = 1_790_000_000.0
STEP_S, GENERATE_S, TRANSFER_S, UPDATE_S, SYNC_S = 10.0, 3.0, 0.2, 5.0, 0.8
NUM_STEPS, NUM_ENGINES, REQUESTS_PER_ENGINE = 60, 2, 8
LOST_STEP, RESTART_STEP = 20, 40
"""Steps in which an engine is lost for 25 seconds, and after which the run restarts."""


def step_metrics(step: int, seed: int = 0, lr: float = 2e-4) -> dict[str, float]:
    """Metrics of a run that learns. All clipped tokens are at the lower bound, so two curves coincide."""
    noise = np.random.default_rng([seed, step]).normal(size=8)
    learned = 1 - math.exp(-step / (15 + 5 * seed))
    moved = 0.15 * math.sin(step / 6 + seed)
    generate_s = GENERATE_S + 0.4 * abs(noise[0])
    return {
        "actor/bapo_clip_high": 1.35 + moved,
        "actor/bapo_clip_low": 0.7 + moved / 2,
        "actor/bapo_initial_positive_share": 0.33 + 0.01 * noise[1],
        "actor/bapo_positive_share": 0.4 + 0.003 * noise[2],
        "actor/entropy": 1.9 - 1.1 * learned + 0.02 * noise[3],
        "actor/grad_norm": 0.8 + 0.1 * abs(noise[4]),
        "actor/lr": lr * min(1.0, step / 10),
        "actor/pg_clipfrac": 0.02 + 0.005 * abs(noise[5]),
        "actor/pg_clipfrac_lower": 0.02 + 0.005 * abs(noise[5]),
        "actor/pg_clipfrac_upper": 0.0,
        "actor/ppo_kl": 0.002 + 0.0004 * noise[6],
        "critic/score/mean": 0.25 + 0.55 * learned + 0.02 * noise[7],
        "perf/throughput": 1200 + 60 * noise[0],
        "response_length/clip_ratio": 0.12 * (1 - learned),
        "response_length/max": 64.0,
        "response_length/mean": 40 - 12 * learned + noise[1],
        "rollout/accounting/buffered": 3.0,
        "rollout/accounting/taken": 16.0 * step + 12,
        "rollout/accounting/dropped_stale": 0.0,
        "rollout/accounting/dropped_uniform": float(step // 3),
        "rollout/accounting/in_flight": 8.0,
        "rollout/accounting/quarantined": float(step >= LOST_STEP),
        "rollout/accounting/returned": 0.0,
        "rollout/accounting/trained": 16.0 * step + 1 - step // 3 - (step >= LOST_STEP),
        "rollout/staleness/max": 1.0 + (step % 7 == 0),
        "rollout/staleness/mean": 0.6 + 0.05 * noise[2],
        "timing_s/generate": generate_s,
        "timing_s/step": generate_s + TRANSFER_S + UPDATE_S + SYNC_S,
        "timing_s/transfer": TRANSFER_S,
        "timing_s/update": UPDATE_S,
        "timing_s/weight_sync": SYNC_S,
        "training/rollout_probs_diff_max": 2e-3 * (1 + abs(noise[3])),
        "training/rollout_probs_diff_mean": 4e-5 * (1 + abs(noise[4])),
        "training/uniform_groups": 0.5 - 0.3 * learned,
    }


def train_row(step: int, **options: Any) -> MetricsRow:
    time_s = STEP_S * step
    return {
        "step": step,
        "phase": "train",
        "time_s": time_s,
        "unix_s": START_S + time_s,
        "metrics": step_metrics(step, **options),
    }


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def requests_of(step: int) -> list[dict[str, Any]]:
    """Requests of a step: those of engine 1 take longer, and there are none while it is lost."""
    rows = []
    for engine in range(NUM_ENGINES):
        if engine == 1 and LOST_STEP <= step <= LOST_STEP + 2:
            continue
        for i in range(REQUESTS_PER_ENGINE):
            seconds = (0.9 + 0.6 * engine) * (1 + i / REQUESTS_PER_ENGINE)
            sent_s = START_S + STEP_S * (step - 1) + 1.0
            serial = 16 * (step - 1) + 2 * i + engine
            rows.append(
                {
                    "step": step,
                    "prompt_serial": serial,
                    "engine": f"engine {engine}",
                    "sent_s": sent_s,
                    "answered_s": sent_s + seconds,
                    "num_prompt_tokens": 12,
                    "num_tokens": [20 + i, 24, 30, 40],
                }
            )
    return rows


def live_run(
    root: Path, *, num_steps: int = NUM_STEPS, config: str = "", with_faults: bool = True, **options: Any
) -> Path:
    """Write a run. `config` is added to its configuration, `options` are those of `step_metrics`."""
    directory = RunDirectory(root)
    directory.create()
    directory.config.write_text(
        f"run_dir: {root}\nseed: {options.get('seed', 0)}\ntrainer:\n  total_steps: {NUM_STEPS}\n"
        f"algorithm:\n  clip_bounds:\n    positive_contribution_target: 0.4\noptimizer:\n"
        f"  lr: {options.get('lr', 2e-4)}\n{config}"
    )
    with JsonlSink(directory.metrics) as sink:
        for step in range(num_steps + 1):
            if step:
                sink.write(train_row(step, **options))
            if step % 10 == 0:
                accuracy = 0.3 + 0.5 * (1 - math.exp(-step / 20)) - 0.02 * options.get("seed", 0)
                metrics = {"val/mean@4": accuracy, "val/best@4": accuracy + 0.1}
                sink.write({"step": step, "phase": "validation", "time_s": STEP_S * step, "metrics": metrics})
    starts = (START_S - 5, START_S + STEP_S * RESTART_STEP + 4)[: 1 + with_faults]
    start = {"version": "1.0.0", "commit": f"c0ffee{options.get('seed', 0)}", "hardware": "8 × GPU"}
    append(directory.starts, [{"time_s": time_s, **start} for time_s in starts])
    for step in range(1, num_steps + 1):
        append(directory.requests, requests_of(step))
    if with_faults:
        lost_s = START_S + STEP_S * (LOST_STEP - 1) + 2
        append(
            directory.engine_events,
            [
                {
                    "time_s": lost_s,
                    "engine": "engine 1",
                    "event": "lost",
                    "reason": "engine 1 did not answer within 5 s",
                },
                {"time_s": lost_s + 25, "engine": "engine 1", "event": "serves", "reason": "attempt 1"},
            ],
        )
        restart = {
            "time_s": START_S + STEP_S * RESTART_STEP + 0.2,
            "step": RESTART_STEP,
            "reason": "trainer rank 0 was killed",
        }
        append(directory.restarts, [restart])
        append(directory.quarantined, [{"prompt_id": "train:17", "failures": ["the reward is not a number"]}])
    return root
