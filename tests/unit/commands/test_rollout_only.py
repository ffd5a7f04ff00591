from typing import Any

import pytest

from megatron_bapo.commands.rollout_only import without_trainer
from tests.unit.config.examples import config


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, []),
        ({"model__lora": {}}, []),
        ({"model__lora": {"path": "my/adapters"}}, ["model.lora.path=my/adapters"]),
        ({"warm_start": {"num_steps": 3}}, ["no warm start"]),
    ],
)
def test_a_note_names_what_the_model_lacks_without_a_trainer(values: dict[str, Any], expected: list[str]) -> None:
    notes = list(without_trainer(config(**values)))
    assert len(notes) == len(expected)
    assert all(text in note for text, note in zip(expected, notes, strict=True)), notes
