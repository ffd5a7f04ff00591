"""Published speeds of asynchronous over synchronous training, reproduced by the simulator.

python -m bench.published_speedups

The runs and their settings are under `speedups` in published_runs.yaml. Both modes run the scheduler of real runs with
the engines and updates that `plan` estimates; only a part of the engines and prompts is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bench.published_runs import PublishedRun, data, geometric_mean
from bench.report import option_parser, report
from megatron_bapo.simulation.calibration import planned_workload
from megatron_bapo.simulation.simulator import simulate

NUM_STEPS = 16
"""With fewer steps, their longest responses move the ratios by several percent."""
SIGMA = 1.0
"""Sigma of the lognormal response lengths."""


def speedups(row: Mapping[str, Any]) -> list[float]:
    """Return the simulated speeds of the asynchronous run over the synchronous one, for what the source leaves open."""
    cases = [{**row, "response": response} for response in row["response"]]
    return [_step_s(case, "sync", 0) / _step_s(case, "async", each) for case in cases for each in row["staleness"]]


def _step_s(row: Mapping[str, Any], mode: str, staleness: int) -> float:
    fields = {**row, **row[mode], "settings": {"rollout.max_staleness": max(1, staleness)}}
    plan = PublishedRun(fields, data()["bases"][row["base"]]).plan()
    workload = planned_workload(plan, mean_response=row["response"], sigma=SIGMA)
    engine, divide = workload.engine, row["divide"]
    # Both modes wait for the weight transfer, a colocated trainer also for its state to move.
    waiting = plan.time.weight_sync + plan.time.between + plan.time.offload
    workload = replace(
        workload,
        engine=replace(engine, load_s=waiting),
        num_engines=workload.num_engines // divide,
        groups_per_batch=workload.groups_per_batch // divide,
        train_s=fields.get("train_s", workload.train_s),
    )
    done = simulate(plan.config.rollout, workload, num_steps=NUM_STEPS, num_first_steps=staleness + 1)
    return done.seconds / done.num_steps


def main() -> None:
    ratios, rows = dict[str, float](), []
    for row in data()["speedups"]:
        simulated = speedups(row)
        ratios[row["name"]] = geometric_mean(simulated) / row["published"]
        shown = f"{min(simulated):.2f} to {max(simulated):.2f}"
        rows.append((row["name"], row["published"], shown, ratios[row["name"]]))
    report("published_speedups", ("run", "published", "simulated", "ratio"), rows, ratios=ratios, figures={})


if __name__ == "__main__":
    option_parser(__doc__).parse_args()
    main()
