import re
from pathlib import Path

import pytest

from megatron_bapo.config.checks import check_planned
from megatron_bapo.config.loading import dump_config, load_config
from tests.unit.planning.examples import RECIPES, recipe

NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_keeps_every_rule_without_a_warning_and_fits(name: str) -> None:
    plan = recipe(name)
    assert check_planned(plan.config, plan.architecture, name) == []
    assert plan.problems == []
    assert recipe(name, gpu="H200").fits
    assert recipe(name, gpu="H200", placement="separate").fits


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_survives_being_written_out(name: str, tmp_path: Path) -> None:
    config = load_config(RECIPES / f"{name}.yaml")
    (tmp_path / "config.yaml").write_text(dump_config(config))

    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_name_is_its_run_directorys_and_says_its_model_and_gpus(name: str) -> None:
    config = load_config(RECIPES / f"{name}.yaml")
    assert config.run_dir == Path("runs") / name
    if named := re.fullmatch(r"(.+)_(\d+)gpus", name):
        assert config.parallel.world_size == int(named[2])
        assert str(config.model.path).lower().endswith(named[1])


@pytest.mark.parametrize("name", [name for name in NAMES if "staleness" in name])
def test_a_staleness_recipe_makes_as_many_updates_of_a_rollout_batch_as_its_name_says(name: str) -> None:
    assert load_config(RECIPES / f"{name}.yaml").trainer.updates_per_step == int(name[-1])


def test_the_table_of_recipes_is_what_its_command_prints() -> None:
    from tools.plan_recipes import table

    written = (RECIPES.parents[1] / "docs" / "recipes.md").read_text()
    assert table() in written
