import re
from pathlib import Path

import pytest

from megatron_bapo.config.checks import check_planned
from megatron_bapo.config.loading import dump_config, load_config
from megatron_bapo.planning.advice import plan_warnings
from megatron_bapo.planning.search import search
from tests.unit.planning.examples import RECIPES, recipe

NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_keeps_every_rule_without_a_warning_and_fits(name: str) -> None:
    plan = recipe(name)
    assert check_planned(plan.config, plan.architecture, name) == []
    assert plan.problems == plan_warnings(plan) == []
    assert recipe(name, gpu="H200").fits
    assert recipe(name, gpu="H200", placement="separate").fits


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_no_layout_that_a_search_proposes_is_much_faster_than_a_recipe(name: str) -> None:
    plan = recipe(name)
    assert plan.time.total <= 1.05 * search(plan, plan.num_gpus)[0].time.total


def test_a_limit_that_a_long_response_may_exceed_is_warned_about() -> None:
    (warning,) = plan_warnings(recipe("paper_32b_64k", "rollout.request_timeout_s=1200"))
    assert warning.startswith("rollout.request_timeout_s=1200 fails requests that take longer, and the longest")
    assert plan_warnings(recipe("paper_32b_64k")) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_survives_being_written_out(name: str, tmp_path: Path) -> None:
    config = load_config(RECIPES / f"{name}.yaml")
    (tmp_path / "config.yaml").write_text(dump_config(config))

    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_name_is_its_run_directorys_and_says_its_model_and_gpus(name: str) -> None:
    config = load_config(RECIPES / f"{name}.yaml")
    assert config.run_dir == Path("runs") / name
    if named := re.fullmatch(r"(.+)_(\d+)gpus(_async)?", name):
        assert recipe(name).num_gpus == int(named[2])
        assert str(config.model.path).lower().endswith(named[1])


@pytest.mark.parametrize("name", [name for name in NAMES if "staleness" in name])
def test_tokens_of_a_staleness_recipe_are_as_many_updates_old_as_its_name_says(name: str) -> None:
    """Staleness comes from several updates on one rollout batch, as in the paper's study, or from async generation."""
    config = load_config(RECIPES / f"{name}.yaml")
    updates, versions = config.trainer.updates_per_step, config.rollout.max_staleness
    assert int(name[-1]) == (versions * updates if "async" in name else updates)


def test_every_rollout_mode_has_recipes() -> None:
    rollouts = {name: load_config(RECIPES / f"{name}.yaml").rollout for name in NAMES}
    assert {(found.colocate, found.mode) for found in rollouts.values()} == {
        (True, "sync"),
        (False, "sync"),
        (False, "async"),
    }
    assert all((rollouts[name].mode == "async") == ("async" in name) for name in NAMES if "partial" not in name)
    budgets = {name: found.partial_rollout.token_budget for name, found in rollouts.items()}
    assert {name: budget for name, budget in budgets.items() if budget} == {
        name: 1024 * int(name.removesuffix("k").rpartition("_")[2]) for name in NAMES if "partial" in name
    }


@pytest.mark.parametrize("name", [name for name in NAMES if "partial" in name])
def test_a_partial_rollout_recipe_allows_every_piece_of_the_longest_response(name: str) -> None:
    rollout = load_config(RECIPES / f"{name}.yaml").rollout
    assert rollout.max_response_length == rollout.max_staleness * (rollout.partial_rollout.token_budget or 0)


def test_the_table_of_recipes_is_what_its_command_prints() -> None:
    from tools.plan_recipes import table

    written = (RECIPES.parents[1] / "docs" / "guides" / "recipes.md").read_text()
    assert table() in written


def test_gpus_that_engines_leave_idle_are_warned_of() -> None:
    name = "r1-distill-qwen-32b_64gpus"
    (warning,) = plan_warnings(recipe(name, "parallel.world_size=128"))
    assert "rollout.num_engines=16 engines of 4 GPUs use 64 of the trainer's 128 GPUs" in warning
    assert warning.endswith("Set it to 32 to use all")
