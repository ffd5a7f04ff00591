"""Simulated steps if the router sends 1, 1.5, 2 or 3 times what an engine's KV cache is expected to hold.

python -m bench.kv_cache_overcommit                 # five recipes: a few minutes
python -m bench.kv_cache_overcommit RECIPE RECIPE   # files in configs/recipes, without .yaml

The scheduler and the router of real runs send requests to engines as `plan` estimates them, on GPUs of their own. Like
vLLM, a full engine preempts its youngest responses, whose tokens it prefills again. A ratio is the seconds of a step
over those with the router's own factor; it averages three steps after the first ones.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from bench.report import option_parser, report
from megatron_bapo.config.loading import load_config
from megatron_bapo.planning.hardware import Assumptions
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.response_lengths import mean_response
from megatron_bapo.rollout import router
from megatron_bapo.simulation.calibration import planned_workload
from megatron_bapo.simulation.simulator import simulate

RECIPES = Path(__file__).parents[1] / "configs" / "recipes"
NAMES = (
    *("paper_32b_64k", "paper_32b_64k_partial_16k", "qwen3-32b_64gpus", "qwen2.5-7b_8gpus"),
    "paper_octothinker_3b_async",
)
FACTORS = (1, 1.5, 2, 3)
NUM_STEPS = 3


def step_s(name: str) -> dict[float, float]:
    """Return the simulated seconds of a step of a recipe on H100, by the factor."""
    config, assumptions = load_config(RECIPES / f"{name}.yaml"), Assumptions()
    plan = Plan(config, architecture_of(config.model)[0], "H100", assumptions)
    mean, sigma = mean_response(config, assumptions), assumptions.length_sigma
    workload = planned_workload(plan, mean_response=mean, sigma=sigma)
    found: dict[float, float] = {}
    for factor in FACTORS:
        with patch.object(router, "KV_OVERCOMMIT", factor):
            first = config.rollout.max_staleness + 1
            done = simulate(config.rollout, workload, num_steps=NUM_STEPS, num_first_steps=first)
        found[factor] = done.seconds / done.num_steps
    return found


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("recipes", nargs="*", default=NAMES, metavar="RECIPE")
    ratios, figures, rows = dict[str, float](), dict[str, float](), list[tuple[object, ...]]()
    for name in parser.parse_args().recipes:
        seconds = step_s(name)
        rows.append((name, *seconds.values()))
        figures[f"{name}_s"] = round(seconds[router.KV_OVERCOMMIT], 1)
        ratios |= {
            f"{name}_{factor:g}_to_{router.KV_OVERCOMMIT}": round(each / seconds[router.KV_OVERCOMMIT], 3)
            for factor, each in seconds.items()
            if factor != router.KV_OVERCOMMIT
        }
        print(f"{name}: {', '.join(f'{each:.1f} s with {factor:g}' for factor, each in seconds.items())}", flush=True)
    columns = ("recipe", *(f"s/step with {factor:g}" for factor in FACTORS))
    report("kv_cache_overcommit", columns, rows, ratios=ratios, figures=figures)


if __name__ == "__main__":
    main()
