"""What to simulate: a configuration on GPUs as the planner sees them, or a run that was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from megatron_bapo.errors import UserError
from megatron_bapo.metrics.sinks import read_rows
from megatron_bapo.planning.hardware import GIB, GPUS, Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.rollout_memory import engine_memory
from megatron_bapo.planning.timing import decode_cost, prefill_seconds
from megatron_bapo.rollout.answer_lengths import lognormal_lengths
from megatron_bapo.rollout.engine_costs import EngineCosts, fitted, observed
from megatron_bapo.rollout.modelled_engine import EngineModel
from megatron_bapo.rollout.simulation import Simulated, Workload

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
            sequence_s=0.0,
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


@dataclass(frozen=True)
class RecordedRun:
    """A synchronous run without its first step, which warms up."""

    folder: Path
    config: Config
    rows: Sequence[dict[str, Any]]
    """Metrics of its steps."""
    requests: Sequence[dict[str, Any]]
    """Those of training prompts (`AnsweredRequest`), by step."""

    def mean(self, name: str) -> float:
        return float(np.mean([row[name] for row in self.rows]))

    @property
    def lengths(self) -> np.ndarray:
        return np.array([num for request in self.requests for num in request["num_tokens"]], np.int32)

    @property
    def score_s(self) -> float:
        """Between the engines' last token and the batch."""
        ends: dict[int, float] = {}
        starts: dict[int, float] = {}
        for request in self.requests:
            step = request["step"]
            starts[step] = min(request["sent_s"], starts.get(step, request["sent_s"]))
            ends[step] = max(request["answered_s"], ends.get(step, 0.0))
        engines_s = np.mean([ends[step] - starts[step] for step in ends])
        return max(0.0, self.mean("timing_s/generate") - float(engines_s))


def recorded_run(folder: Path) -> RecordedRun:
    """Raises UserError where a run cannot tell how long generation takes on its own."""
    config = load_config(folder / "config.yaml", [])
    if config.rollout.mode != "sync" or config.rollout.partial_rollout.token_budget is not None:
        raise UserError(
            f"{folder} was not recorded with rollout.mode=sync and whole answers, and generation shared its time with "
            "other work; calibrate from a synchronous run"
        )
    trained = (row for row in read_rows(folder / "metrics.jsonl") if row["phase"] == "train")
    rows = [row["metrics"] for row in trained if row["step"] > 1]
    if len(rows) < MIN_STEPS:
        raise UserError(f"{folder} has {len(rows)} steps after its first; at least {MIN_STEPS} are needed")
    path = folder / "requests.jsonl"
    if not path.exists():
        raise UserError(f"{path} is missing, which says when which answer was finished; record the run again")
    requests = [row for row in read_rows(path) if row["order"] >= 0 and row["step"] > 1]
    return RecordedRun(folder, config, rows, requests)


def recorded_workload(run: RecordedRun, *others: RecordedRun) -> tuple[Workload, EngineCosts]:
    """That of a run, and how well its costs are known.

    `others`: runs on the same machine with other batch sizes, which tell more about what an engine costs.
    """
    config, rollout = run.config, run.config.rollout
    costs = fitted([observed(each.requests, each.config.rollout.max_num_seqs) for each in (run, *others)])
    architecture, _ = architecture_of(config.model)
    kv_per_token = engine_memory(config, architecture, GPUS["H100"], Assumptions()).kv_per_token
    kv_cache = (rollout.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB
    generate_s, sync_s = run.mean("timing_s/generate"), run.mean("timing_s/weight_sync")
    train_s = run.mean("timing_s/step") - generate_s - sync_s
    return Workload(
        engine=EngineModel(
            decode=costs.decode,
            prefill_s=0.0,
            sequence_s=costs.sequence_s,
            kv_tokens=int(kv_cache / kv_per_token),
            max_num_seqs=rollout.max_num_seqs,
            load_s=sync_s,
            num_cores=run.mean("perf/cpu_s/rollouts") / generate_s / rollout.num_engines,
        ),
        num_engines=rollout.num_engines,
        groups_per_batch=config.prompts_per_step,
        prompt_tokens=max(1, round(float(np.mean([request["num_prompt_tokens"] for request in run.requests])))),
        lengths=run.lengths,
        train_s=train_s,
        score_s=run.score_s,
        num_cores=run.mean("perf/cpu_cores"),
        trainer_cores=run.mean("perf/cpu_s/update") / train_s,
    ), costs


def doubts_of(costs: EngineCosts, results: Mapping[str, Simulated]) -> list[str]:
    """What of a simulation the recorded runs do not bear out, in words."""
    doubts = []
    if costs.unsure:
        doubts.append(
            f"the run does not tell apart what these cost: {', '.join(costs.unsure)}; add a synchronous run with "
            "another trainer.train_batch_size (--and-run), or record more steps"
        )
    crowded = [
        name
        for name, result in results.items()
        if result.num_running > costs.most_sequences * max(0.0, 1 - result.engine_idle)
    ]
    if crowded:
        doubts.append(
            f"engines would run more answers at a time than the {costs.most_sequences} of the recorded runs with: "
            f"{'; '.join(crowded)}; add a synchronous run with a larger trainer.train_batch_size (--and-run)"
        )
    return doubts
