import shutil
from pathlib import Path

import pytest

from megatron_bapo.config.schema import ModelConfig
from megatron_bapo.errors import UserError
from megatron_bapo.planning.known_models import FOLDER, architecture_of


def test_a_folder_that_is_not_here_is_known_by_its_name() -> None:
    architecture, where = architecture_of(ModelConfig(path=Path("/elsewhere/Qwen3-8B")))
    assert (architecture.num_hidden_layers, where) == (36, "Qwen3-8B, as published")


def test_a_folder_that_is_here_says_it_itself(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    shutil.copytree(FOLDER / "Qwen3-32B", folder)
    architecture, where = architecture_of(ModelConfig(path=folder))
    assert (architecture.num_hidden_layers, where) == (64, str(folder / "config.json"))


def test_a_model_that_is_created_has_the_shape_that_is_asked_for() -> None:
    architecture, where = architecture_of(ModelConfig.model_validate({"create": {"num_hidden_layers": 6}}))
    assert (architecture.num_hidden_layers, where) == (6, "model.create")


def test_an_unknown_model_is_named_with_the_known_ones_and_the_ways_out() -> None:
    with pytest.raises(UserError) as caught:
        architecture_of(ModelConfig(path=Path("models/Mystery-9B")))
    message = str(caught.value)
    assert "model.path=models/Mystery-9B has no config.json here" in message
    assert "Qwen3-30B-A3B" in message
    assert "copy the checkpoint's config.json into that folder" in message
