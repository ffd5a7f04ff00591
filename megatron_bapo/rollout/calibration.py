"""What to simulate: a configuration on GPUs as the planner sees them, or a run that was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.planning.decode_cost import DecodeCost
from megatron_bapo.planning.hardware import GIB, GPUS, Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.rollout_memory import engine_memory
from megatron_bapo.planning.timing import decode_cost, prefill_seconds
from megatron_bapo.rollout.answer_lengths import lognormal_lengths, recorded_lengths
from megatron_bapo.rollout.modelled_engine import EngineModel
from megatron_bapo.rollout.simulation import Workload

MIN_STEPS = 4
CPU_KV_CACHE_GIB = 0.5
"""What an engine without GPUs takes when `rollout.kv_cache_gib` is not given."""


def planned_workload(plan: Plan, *, mean_response: float, sigma: float) -> Workload:
    """Of engines on GPUs of their own, with answers of a lognormal length."""
    limit = plan.config.rollout.max_response_length
    if not 1 <= mean_response < limit:
        raise UserError(
            f"a mean answer of {mean_response:.0f} tokens is not between 1 and rollout.max_response_length={limit}; "
            "give another --mean-response"
        )
    lengths = lognormal_lengths(mean_response, sigma, limit)
    prompt = plan.config.data.max_prompt_length * plan.assumptions.mean_prompt_fraction
    totals = lengths + prompt
    assumptions = replace(
        plan.assumptions,
        mean_response_fraction=mean_response / limit,
        square_over_mean=float((totals**2).mean() / totals.mean() ** 2),
    )
    plan = replace(plan, placement="separate", assumptions=assumptions)
    known = (plan.config, plan.architecture, plan.gpu)
    if plan.engine.kv_tokens < plan.engine.max_model_len:
        raise UserError("; ".join(plan.problems))
    return Workload(
        engine=EngineModel(
            decode=decode_cost(*known, plan.engine, assumptions, max(1.0, plan.engine.num_concurrent)),
            prefill_s=prefill_seconds(*known, assumptions, 1.0),
            kv_tokens=plan.engine.kv_tokens,
            max_num_seqs=plan.config.rollout.max_num_seqs,
            load_s=plan.time.weight_sync,
        ),
        num_engines=plan.config.rollout.num_engines,
        groups_per_batch=plan.config.prompts_per_step,
        prompt_tokens=max(1, round(prompt)),
        lengths=lengths,
        train_s=plan.time.training,
    )


def recorded_workload(run_dir: Path, *others: Path) -> tuple[Config, Workload]:
    """Of a synchronous run's metrics, and its configuration. The first step, which warms up, is left out.

    `others`: synchronous runs on the same machine with other batch sizes. Where the longest answer is always the limit,
    one run cannot tell what a step costs from what a sequence costs, and they can. Raises UserError where a run cannot
    tell how long generation takes on its own.
    """
    config, rows = _recorded(run_dir)
    rollout = config.rollout
    num, mean = config.trainer.train_batch_size, _mean(rows, "response_length/mean")
    architecture, _ = architecture_of(config.model)
    kv_per_token = engine_memory(config, architecture, GPUS["H100"], Assumptions()).kv_per_token
    kv_cache = (rollout.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB
    generate_s, sync_s = _mean(rows, "timing_s/generate"), _mean(rows, "timing_s/weight_sync")
    return config, Workload(
        engine=EngineModel(
            _fitted([(config, rows), *map(_recorded, others)]),
            0.0,
            int(kv_cache / kv_per_token),
            rollout.max_num_seqs,
            sync_s,
        ),
        num_engines=rollout.num_engines,
        groups_per_batch=config.prompts_per_step,
        prompt_tokens=max(1, round(_mean(rows, "perf/total_num_tokens") / num - mean)),
        lengths=recorded_lengths(
            mean,
            _mean(rows, "response_length/max"),
            _mean(rows, "response_length/clip_ratio"),
            num,
            rollout.max_response_length,
        ),
        train_s=_mean(rows, "timing_s/step") - generate_s - sync_s,
    )


def _recorded(run_dir: Path) -> tuple[Config, list[dict[str, Any]]]:
    config = load_config(run_dir / "config.yaml", [])
    if config.rollout.mode != "sync" or config.rollout.partial_rollout.token_budget is not None:
        raise UserError(
            f"{run_dir} was not recorded with rollout.mode=sync and whole answers, and generation shared its time with "
            "other work; calibrate from a synchronous run"
        )
    rows = [row["metrics"] for row in read_rows(run_dir / "metrics.jsonl") if row["phase"] == "train"][1:]
    if len(rows) < MIN_STEPS:
        raise UserError(f"{run_dir} has {len(rows)} steps after its first; at least {MIN_STEPS} are needed")
    return config, rows


def _fitted(runs: Sequence[tuple[Config, list[dict[str, Any]]]]) -> DecodeCost:
    """Least squares of the seconds of generation by decoding steps and tokens; neither costs less than nothing.

    A batch takes as many steps as its longest answer has tokens, or more where not all of it runs at once.
    """
    batches: list[tuple[float, float, float]] = []
    for config, rows in runs:
        num = config.trainer.train_batch_size / config.rollout.num_engines
        for row in rows:
            tokens = row["response_length/mean"] * num
            steps = max(row["response_length/max"], tokens / config.rollout.max_num_seqs)
            batches.append((steps, tokens, row["timing_s/generate"]))
    steps, tokens, seconds = np.array(batches).T
    (overhead, per_sequence), *_ = np.linalg.lstsq(np.stack([steps, tokens], 1), seconds, rcond=None)
    if overhead < 0:
        overhead, per_sequence = 0.0, seconds.sum() / tokens.sum()
    elif per_sequence < 0:
        overhead, per_sequence = seconds.sum() / steps.sum(), 0.0
    return DecodeCost(overhead=float(overhead), weights=0.0, per_token=0.0, per_sequence=float(per_sequence))


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
