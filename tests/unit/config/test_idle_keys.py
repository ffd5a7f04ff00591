from pathlib import Path
from typing import Any

import pytest

from megatron_bapo.config.checks import check_config
from megatron_bapo.config.idle_keys import idle_key_warnings
from megatron_bapo.config.loading import load_config
from megatron_bapo.config.schema import Config
from tests.unit.config.examples import ARITHMETIC, config

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("values", "condition", "expected"),
    [
        (
            {"algorithm__clip_ratio_high": 0.28, "algorithm__clip_ratio_low": 0.2},
            {"algorithm__objective": "ppo"},
            "algorithm.clip_ratio_high=0.28 has no effect without algorithm.objective=ppo, gspo, cispo or function "
            "(BAPO's bounds are algorithm.clip_bounds); set that, or remove it",
        ),
        (
            {"algorithm__tau_pos": 2.0, "algorithm__tau_neg": 3.0},
            {"algorithm__objective": "sapo"},
            "algorithm.tau_pos=2.0, algorithm.tau_neg=3.0 have no effect without algorithm.objective=sapo; set that",
        ),
        (
            {"algorithm__kl_loss_unbiased": True},
            {"algorithm__kl_loss_coef": 0.1},
            "algorithm.kl_loss_unbiased=true has no effect without algorithm.kl_loss_coef; set that, or remove it",
        ),
        (
            {"reward__max_tests": 3, "reward__sandbox": {"cpu_s": 2.0}},
            {"reward__type": "code"},
            "reward.sandbox.cpu_s=2.0, reward.max_tests=3 have no effect without reward.type=code; set that, or remove",
        ),
        (
            {"environment__sandbox": {"memory_gib": 2.0}},
            {"environment__type": "python"},
            "environment.sandbox.memory_gib=2.0 has no effect without environment.type=python; set that, or remove it",
        ),
        (
            {"parallel__recompute_modules": ("mlp",)},
            {"parallel__recompute_granularity": "selective"},
            "parallel.recompute_modules=['mlp'] has no effect without parallel.recompute_granularity=selective; set",
        ),
        (
            {"parallel__pipeline_model_parallel_layout": "auto"},
            {"parallel__pipeline_model_parallel_size": 2, "parallel__world_size": 2},
            "parallel.pipeline_model_parallel_layout=auto has no effect without parallel.pipeline_model_parallel_size",
        ),
        (
            {"optimizer__min_lr": 1e-7},
            {"optimizer__lr_decay_style": "cosine"},
            "optimizer.min_lr=1e-07 has no effect without optimizer.lr_decay_style other than constant",
        ),
        (
            {"algorithm__norm_adv_by_std": False, "algorithm__adv_estimator": "rloo"},
            {"algorithm__adv_estimator": "grpo"},
            "algorithm.norm_adv_by_std=false has no effect without algorithm.adv_estimator=grpo",
        ),
        (
            {"logging__profile_steps": (3, 11)},
            {"trainer__total_steps": 11},
            "logging.profile_steps=[3, 11] has no effect without trainer.total_steps at least as high as its last",
        ),
        (
            {"data__chat_template": False, "data__chat_template_kwargs": {"enable_thinking": False}},
            {"data__chat_template": True},
            "data.chat_template_kwargs={'enable_thinking': False} has no effect without data.chat_template=true; set",
        ),
        ({"evaluation__n": 9}, {"data__validation": ARITHMETIC | {"seed": 2}}, "evaluation.n=9 has no effect without"),
        ({"rollout__max_staleness": 4}, {"rollout__max_reuse": 2}, "rollout.max_staleness=4 has no effect without"),
        ({"rollout__on_stale": "drop"}, {"rollout__max_reuse": 2}, "rollout.on_stale=drop has no effect without"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_key_that_has_no_effect_is_warned_about(
    values: dict[str, Any], condition: dict[str, Any], expected: str
) -> None:
    (warning,) = check_config(config(**values))
    assert warning.startswith(expected)
    assert check_config(config(**values | condition)) == []


def test_a_section_without_effect_is_one_warning_that_omits_default_values() -> None:
    bounds = {"ratio_upper_max": 4.0, "method": "speculate", "ratio_lower_start": 0.6}
    (warning,) = check_config(config(algorithm={"objective": "ppo", "clip_bounds": bounds}))
    listed, _, _ = warning.partition(" have no effect without algorithm.objective=bapo")
    assert listed == "algorithm.clip_bounds.ratio_upper_max=4.0, algorithm.clip_bounds.method=speculate"


def test_a_configuration_with_every_default_written_out_has_no_warning() -> None:
    assert list(idle_key_warnings(Config.model_validate(config().model_dump()))) == []


@pytest.mark.parametrize("folder", [".", "recipes", "objectives"])
def test_no_shipped_configuration_has_a_key_without_effect(folder: str) -> None:
    paths = sorted((CONFIGS / folder).glob("*.yaml"))
    assert paths
    assert {path.name: found for path in paths if (found := [*idle_key_warnings(load_config(path))])} == {}
