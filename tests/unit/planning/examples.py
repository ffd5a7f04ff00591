"""Plans that the tests of this folder share."""

from dataclasses import replace
from pathlib import Path

from megatron_bapo.config.loading import load_config
from megatron_bapo.planning.hardware import Assumptions, GpuName
from megatron_bapo.planning.known_models import architecture_of
from megatron_bapo.planning.plan import Plan
from megatron_bapo.planning.settings import Placement, with_placement

RECIPES = Path(__file__).parents[3] / "configs" / "recipes"


def recipe(name: str, *overrides: str, gpu: GpuName = "H100", placement: Placement | None = None) -> Plan:
    config = load_config(RECIPES / f"{name}.yaml", overrides)
    config = with_placement(config, placement) if placement is not None else config
    architecture, _ = architecture_of(config.model)
    return Plan(config, architecture, gpu, Assumptions())


def changed(plan: Plan, overrides: list[str], name: str) -> Plan:
    """The recipe under these overrides, on the same GPUs."""
    return replace(plan, config=load_config(RECIPES / f"{name}.yaml", overrides))
