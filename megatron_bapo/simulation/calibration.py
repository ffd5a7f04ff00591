"""Workloads for the simulator, from a configuration and the planner's estimates or from recorded runs."""

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
from megatron_bapo.planning.generation_time import decode_cost, prefill_seconds
from megatron_bapo.planning.hardware import GIB, GPUS, Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.response_lengths import root
from megatron_bapo.planning.rollout_memory import engine_memory
from megatron_bapo.planning.settings import with_placement
from megatron_bapo.simulation.engine_costs import EngineCosts, fitted, observed
from megatron_bapo.simulation.modelled_engine import EngineModel
from megatron_bapo.simulation.response_lengths import lognormal_lengths
from megatron_bapo.simulation.simulator import Simulated, Workload, simulate

MIN_STEPS = 4
NUM_SIMULATIONS, NUM_BISECTIONS = 4, 7
"""Search effort for the number of cores that engines and trainer share, accurate to a hundredth of a core."""
CPU_KV_CACHE_GIB = 0.5
"""KV cache of an engine without GPUs when `rollout.kv_cache_gib` is not given."""


def planned_workload(plan: Plan, *, mean_response: float, sigma: float) -> Workload:
    """Return the workload of engines on GPUs of their own whose response lengths are lognormal.

    `mean_response` is in tokens; `sigma` is the parameter of the lognormal. Raises UserError if the mean is not below
    the length limit or the engines do not fit their GPUs.
    """
    limit = plan.config.rollout.max_response_length
    if not 1 <= mean_response < limit:
        raise UserError(
            f"a mean response of {mean_response:.0f} tokens is not between 1 and rollout.max_response_length={limit}; "
            "give another --mean-response"
        )
    lengths = lognormal_lengths(mean_response, sigma, limit)
    prompt = plan.config.data.max_prompt_length * plan.assumptions.mean_prompt_fraction
    assumptions = replace(plan.assumptions, mean_response_fraction=mean_response / limit, length_sigma=sigma)
    plan = replace(plan, config=with_placement(plan.config, "separate"), assumptions=assumptions)
    setup = (plan.config, plan.architecture, plan.engine_gpu)
    if not plan.engine.holds_longest:
        raise UserError("; ".join(plan.problems))
    return Workload(
        engine=EngineModel(
            decode=decode_cost(*setup, plan.engine, assumptions),
            prefill_s=prefill_seconds(*setup, assumptions, 1.0),
            sequence_s=0.0,
            kv_tokens=plan.engine.kv_tokens,
            state_tokens=plan.engine.state_tokens,
            shares_prompts=plan.architecture.shares_prompts,
            max_num_seqs=plan.config.rollout.max_num_seqs,
            load_s=plan.time.weight_sync,
        ),
        num_engines=plan.config.rollout.num_engines,
        groups_per_batch=plan.config.prompts_per_step,
        prompt_tokens=max(1, round(prompt)),
        lengths=lengths,
        train_s=plan.time.training,
        stale_train_share=_stale_train_share(plan.config),
    )


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run without its first steps, which warm up and fill the pipeline of an asynchronous run."""

    folder: Path
    config: Config
    num_first_steps: int
    rows: Sequence[dict[str, Any]]
    """Metrics of each step."""
    requests: Sequence[dict[str, Any]]
    """Requests of training prompts (`CompletedRequest`) with their `step`."""

    def mean(self, name: str) -> float:
        return float(np.mean([row[name] for row in self.rows]))

    @property
    def lengths(self) -> np.ndarray:
        return np.array([num for request in self.requests for num in request["num_tokens"]], np.int32)

    @property
    def score_s(self) -> float:
        """Mean seconds between the engines' last token and the complete batch."""
        ends: dict[int, float] = {}
        starts: dict[int, float] = {}
        for request in self.requests:
            step = request["step"]
            starts[step] = min(request["sent_s"], starts.get(step, request["sent_s"]))
            ends[step] = max(request["answered_s"], ends.get(step, 0.0))
        engines_s = np.mean([ends[step] - starts[step] for step in ends])
        return max(0.0, self.mean("timing_s/generate") - float(engines_s))


def recorded_run(folder: Path) -> RecordedRun:
    """Load a synchronous run. Raises UserError if generation shared its time with other work."""
    run = _recorded(folder, num_first_steps=1)
    if run.config.rollout.mode != "sync" or run.config.rollout.partial_rollout.token_budget is not None:
        raise UserError(
            f"{folder} was not recorded with rollout.mode=sync and without a token budget, so generation shared its "
            "time with other work; calibrate from a synchronous run"
        )
    return run


def overlapping_run(folder: Path) -> RecordedRun:
    """Load an asynchronous run. Raises UserError if engines and trainer did not work at the same time."""
    settings = load_config(folder / "config.yaml", []).rollout
    if settings.mode != "async":
        raise UserError(
            f"{folder} was recorded with rollout.mode={settings.mode}: engines and trainer did not work at the same "
            "time; give a run with mode=async"
        )
    return _recorded(folder, num_first_steps=settings.max_staleness + 1)


def _recorded(folder: Path, num_first_steps: int) -> RecordedRun:
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{metrics} is missing; give the directory of a run that has trained")
    trained = (row for row in read_rows(metrics) if row["phase"] == "train")
    rows = [row["metrics"] for row in trained if row["step"] > num_first_steps]
    if len(rows) < MIN_STEPS:
        raise UserError(
            f"{folder} has {len(rows)} steps after its first {num_first_steps}; at least {MIN_STEPS} are needed"
        )
    path = folder / "requests.jsonl"
    if not path.exists():
        raise UserError(f"{path} is missing, which has the finishing time of each response; record the run again")
    requests = [row for row in read_rows(path) if row["prompt_serial"] >= 0 and row["step"] > num_first_steps]
    return RecordedRun(folder, load_config(folder / "config.yaml", []), num_first_steps, rows, requests)


def recorded_workload(run: RecordedRun, *others: RecordedRun) -> tuple[Workload, EngineCosts]:
    """Return the workload of a recorded run and the fitted engine costs with their errors.

    `others` are runs on the same machine with other batch sizes; they make the engine costs more precise.
    """
    config, rollout = run.config, run.config.rollout
    architecture, _ = architecture_of(config.model)
    shares = architecture.shares_prompts
    costs = fitted(
        [observed(each.requests, each.config.rollout.max_num_seqs, shares_prompts=shares) for each in (run, *others)]
    )
    engine = engine_memory(config, architecture, GPUS["H100"], Assumptions())
    kv_cache = (rollout.kv_cache_gib or CPU_KV_CACHE_GIB) * GIB
    generate_s, sync_s = run.mean("timing_s/generate"), run.mean("timing_s/weight_sync")
    train_s = run.mean("timing_s/step") - generate_s - sync_s
    lengths = np.concatenate([each.lengths for each in (run, *others)])
    prompt_tokens = max(1, round(float(np.mean([request["num_prompt_tokens"] for request in run.requests]))))
    tokens_per_batch = config.trainer.train_batch_size * (prompt_tokens + float(lengths.mean()))
    return Workload(
        engine=EngineModel(
            decode=costs.decode,
            prefill_s=0.0,
            sequence_s=costs.sequence_s,
            kv_tokens=int(kv_cache / engine.kv_per_token),
            state_tokens=engine.state_tokens,
            shares_prompts=shares,
            max_num_seqs=rollout.max_num_seqs,
            load_s=sync_s,
            num_cores=run.mean("perf/cpu_s/rollouts") / generate_s / rollout.num_engines,
        ),
        num_engines=rollout.num_engines,
        groups_per_batch=config.prompts_per_step,
        prompt_tokens=prompt_tokens,
        lengths=lengths,
        train_s=train_s * tokens_per_batch / run.mean("perf/total_num_tokens"),
        stale_train_share=_stale_train_share(config),
        score_s=run.score_s,
        num_cores=run.mean("perf/cpu_cores"),
        trainer_cores=run.mean("perf/cpu_s/update") / train_s,
    ), costs


def with_overlap(workload: Workload, run: RecordedRun) -> Workload:
    """Return the workload with the number of shared cores that reproduces the step time of an asynchronous run.

    This number is lower than the machine's core count where engines and trainer compete for memory bandwidth and caches
    and wait for each other's processes, which a synchronous run does not show. It accounts for everything that makes
    the recorded steps longer than the simulated ones. `run` must be from the same machine and may differ only in the
    scheduler's `rollout.*` settings.
    """

    def steps_per_s(num_cores: float) -> float:
        shared = replace(workload, num_cores=num_cores)
        runs = [
            simulate(
                run.config.rollout, shared, num_steps=len(run.rows), num_first_steps=run.num_first_steps, seed=seed
            )
            for seed in range(NUM_SIMULATIONS)
        ]
        return sum(each.num_steps for each in runs) / sum(each.seconds for each in runs)

    alone = max(workload.engine.num_cores * workload.num_engines, workload.trainer_cores)
    target = 1 / run.mean("timing_s/step")
    return replace(
        workload,
        num_cores=root(steps_per_s, target, min(alone, workload.num_cores), workload.num_cores, NUM_BISECTIONS),
    )


def _stale_train_share(config: Config) -> float:
    """Return the share of the training time that a batch of stale tokens adds.

    The clip bounds of a batch's first update need a scoring pass if other weights sampled its tokens
    (`trainer/bound_scopes.py`). A backward pass takes as long as two forward passes.
    """
    algorithm, num_updates = config.algorithm, config.trainer.updates_per_step
    scores = algorithm.searches_minibatch and algorithm.clip_bounds.method == "score"
    if not scores or algorithm.behaviour_policy == "recomputed":
        return 0.0
    return 1 / (4 * num_updates - 1)


def doubts_of(costs: EngineCosts, results: Mapping[str, Simulated]) -> list[str]:
    """Return warnings about the parts of a simulation that the recorded runs do not support."""
    doubts = []
    if costs.uncertain:
        doubts.append(
            f"the recorded runs do not separate these costs: {', '.join(costs.uncertain)}; add a synchronous run with "
            "another trainer.train_batch_size (--and-run), or record more steps"
        )
    extrapolated = [name for name, result in results.items() if result.most_running > costs.max_sequences]
    if extrapolated:
        doubts.append(
            f"engines would run more sequences at a time than the {costs.max_sequences} of the recorded runs with: "
            f"{'; '.join(extrapolated)}; add a synchronous run with a larger trainer.train_batch_size (--and-run)"
        )
    return doubts
