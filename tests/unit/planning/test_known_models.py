import shutil
from pathlib import Path

import pytest

from megatron_bapo.config.model import ModelConfig
from megatron_bapo.errors import UserError
from megatron_bapo.planning.known_models import FOLDER, SAME_CONFIG, architecture_of, known_models
from megatron_bapo.planning.parameters import num_active_parameters, num_parameters

BILLIONS = {
    "Qwen2.5-1.5B-Instruct": 1.54,
    "Qwen2.5-3B-Instruct": 3.09,
    "Qwen2.5-7B-Instruct": 7.61,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-14B-Instruct": 14.7,
    "Qwen2.5-32B-Instruct": 32.5,
    "Qwen2.5-Math-1.5B": 1.54,
    "Qwen2.5-Math-1.5B-Instruct": 1.54,
    "Qwen2.5-Math-7B": 7.61,
    "Qwen2.5-Math-7B-Instruct": 7.61,
    "Qwen3-8B-Base": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-14B-Base": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B-Base": 30.5,
    "Qwen3-30B-A3B-Instruct-2507": 30.5,
    "Qwen3-30B-A3B-Thinking-2507": 30.5,
    "Qwen3-235B-A22B": 235.0,
    "GLM-4.5-Air": 106,
    "GLM-4.5-Air-Base": 106,
    "GLM-4.7-Flash": 30,
    "DeepSeek-V3": 671,
    "Moonlight-16B-A3B": 16,
    "Qwen3-Next-80B-A3B-Thinking": 80,
    "Qwen3.5-27B": 27,
    "Qwen3.5-35B-A3B": 35,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1.78,
    "DeepSeek-R1-Distill-Qwen-14B": 14.8,
}
"""Parameters as the model cards state them."""


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
    assert "did you mean" not in message
    assert "Qwen3-30B-A3B" in message
    assert "copy the checkpoint's config.json into that folder" in message.lower()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("models/qwen2.5-7b-instruct", "Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-3B-Instruct", "Qwen2.5-3B-Instruct"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", "DeepSeek-R1-Distill-Qwen-14B"),
    ],
)
def test_a_model_id_of_the_hub_is_found_without_regard_to_case(path: str, name: str) -> None:
    assert architecture_of(ModelConfig(path=Path(path)))[1] == f"{name}, as published"


def test_a_misspelled_name_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(UserError, match=r"known; did you mean Qwen2\.5-7B-Instruct\?"):
        architecture_of(ModelConfig(path=Path("Qwen/Qwen-2.5-7B-Instrct")))


@pytest.mark.parametrize("name", BILLIONS)
def test_the_number_of_parameters_is_the_one_on_the_model_card(name: str) -> None:
    architecture, _ = architecture_of(ModelConfig(path=Path(name)))
    assert num_parameters(architecture) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("Qwen2.5-7B", 131072),
        ("Qwen2.5-7B-Instruct", 32768),
        ("Qwen2.5-Math-7B", 4096),
        ("Qwen3-14B-Base", 32768),
        ("Qwen3-14B", 40960),
        ("Qwen3-30B-A3B-Instruct-2507", 262144),
    ],
)
def test_variants_of_one_shape_differ_in_their_context_length(name: str, positions: int) -> None:
    assert architecture_of(ModelConfig(path=Path(name)))[0].context_length == positions


def test_every_known_model_can_be_planned_and_only_experts_are_partly_active() -> None:
    for name in known_models():
        architecture, _ = architecture_of(ModelConfig(path=Path(name)))
        assert num_active_parameters(architecture) <= num_parameters(architecture)
        assert bool(architecture.moe_layers) == name.startswith(
            (
                "Qwen3-30B-A3B",
                "Qwen3-235B-A22B",
                "Qwen3-Next",
                "Qwen3.5-35B-A3B",
                "GLM-4.5",
                "GLM-4.7-Flash",
                "DeepSeek-V3",
                "Moonlight",
                "gpt-oss",
            )
        )


def test_names_that_share_a_config_have_no_folder_of_their_own() -> None:
    folders = {folder.name for folder in FOLDER.iterdir() if folder.is_dir()}
    assert set(SAME_CONFIG.values()) <= folders
    assert not set(SAME_CONFIG) & folders
