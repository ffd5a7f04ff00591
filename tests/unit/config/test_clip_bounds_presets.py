"""The presets of the clip bounds search."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_bapo.config.algorithm import ClipBoundsSettings
from megatron_bapo.config.loading import dump_config, load_config

PAPER = (0.4, (0.6, 0.9, 0.02), (1.2, 3.0, 0.05), "value", "upper_first", "share", "minibatch")
RELEASED_CODE = (0.5, (0.6, 0.8, 0.05), (1.2, 2.0, 0.05), "value", "lower_first", "ratio", "microbatch")
OCTOTHINKER = (0.45, (0.8, 0.9, 0.02), (1.2, 2.0, 0.05), "value", "upper_first", "share", "minibatch")


def resolved(settings: ClipBoundsSettings) -> tuple[Any, ...]:
    s = settings
    return (
        s.positive_contribution_target,
        (s.ratio_lower_start, s.ratio_lower_max, s.ratio_lower_step),
        (s.ratio_upper_start, s.ratio_upper_max, s.ratio_upper_step),
        s.contribution,
        s.search_order,
        s.target_measure,
        s.scope,
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, PAPER),
        ({"preset": "paper"}, PAPER),
        ({"preset": "released_code"}, RELEASED_CODE),
        ({"preset": "octothinker"}, OCTOTHINKER),
    ],
)
def test_a_preset_sets_every_value(values: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert resolved(ClipBoundsSettings.model_validate(values)) == expected


def test_a_given_key_wins_over_the_preset() -> None:
    settings = ClipBoundsSettings.model_validate({"preset": "octothinker", "ratio_upper_max": 2.5})
    assert resolved(settings) == (0.45, (0.8, 0.9, 0.02), (1.2, 2.5, 0.05), *OCTOTHINKER[3:])


def test_the_dump_shows_the_presets_values_and_loads_back_equal(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "run_dir: runs/test\nmodel: {create: {}}\ndata: {train: {path: prompts.jsonl}}\n"
        "trainer: {total_steps: 1, train_batch_size: 8, ppo_mini_batch_size: 8}\n"
    )
    config = load_config(file, ["algorithm.clip_bounds.preset=released_code"])
    assert resolved(config.algorithm.clip_bounds) == RELEASED_CODE
    text = dump_config(config)
    assert "preset: released_code\n    positive_contribution_target: 0.5\n" in text
    file.write_text(text)
    assert load_config(file) == config


@pytest.mark.parametrize("preset", ["dapo", None, ["paper"]])
def test_an_unknown_preset_is_refused_with_the_known_ones(preset: Any) -> None:
    with pytest.raises(ValidationError, match="'paper', 'released_code' or 'octothinker'"):
        ClipBoundsSettings.model_validate({"preset": preset})


def test_predicting_the_bounds_of_micro_batches_is_refused() -> None:
    with pytest.raises(ValidationError, match="set method=score or scope=minibatch"):
        ClipBoundsSettings.model_validate({"preset": "released_code", "method": "speculate"})
    assert ClipBoundsSettings(method="speculate").scope == "minibatch"


def test_a_presets_range_is_checked_together_with_the_given_keys() -> None:
    with pytest.raises(ValidationError, match=r"need ratio_lower_start <= ratio_lower_max <= 1, got 0.8, 0.7"):
        ClipBoundsSettings.model_validate({"preset": "octothinker", "ratio_lower_max": 0.7})
