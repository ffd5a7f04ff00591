import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

from megatron_bapo.commands.evaluated_model import find_model
from megatron_bapo.config.evaluation import EvalConfig, EvaluatedModelConfig
from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.controller.run_state import RunState
from megatron_bapo.errors import UserError
from megatron_bapo.model.hf_create import create_checkpoint
from megatron_bapo.trainer.conversion import checkpoint_from_hugging_face

MODEL = CreateModelConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=1,
                          num_key_value_heads=1)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_checkpoint(tmp_path / "model", MODEL, ["abc", "xyz"], seed=0)
    return tmp_path / "model"


@pytest.fixture
def checkpoint(folder: Path) -> Path:
    target = folder.parent / "step-00000007"
    checkpoint_from_hugging_face(
        folder, target, RunState().to_json(), max_file_bytes=1 << 30, advance=lambda num_bytes: None
    )
    return target


def test_a_hugging_face_folder_is_served_as_it_is(folder: Path) -> None:
    model = find_model(EvaluatedModelConfig(path=folder), folder / "unused")
    assert (model.folder, model.weights, model.dtype) == (folder, folder, "float32")
    model.convert(Console())
    assert not (folder / "unused").exists()


def test_a_checkpoint_is_served_as_a_hugging_face_folder_with_the_same_weights(folder: Path, checkpoint: Path) -> None:
    model = find_model(EvaluatedModelConfig(path=checkpoint, origin=folder), folder.parent / "hf")
    assert (model.weights, model.origin) == (checkpoint / "weights", folder)
    model.convert(Console(quiet=True))

    written, original = (AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (model.folder, folder))
    assert written.keys() == original.keys()
    assert all(written[name].equal(original[name]) for name in original)
    before = [(path, path.stat().st_mtime_ns) for path in sorted(model.folder.iterdir())]
    model.convert(Console(quiet=True))
    assert [(path, path.stat().st_mtime_ns) for path in sorted(model.folder.iterdir())] == before


def test_a_checkpoint_outside_a_run_directory_needs_its_origin(folder: Path, checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"nothing names the model of .* as model\.origin"):
        find_model(EvaluatedModelConfig(path=checkpoint), folder.parent / "hf")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_config_json_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json must be (a )?JSON"):
        find_model(EvaluatedModelConfig(path=folder), folder / "unused")


def test_a_missing_origin_is_requested_by_evals_own_key(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"there is no .*gone/config\.json; give .* as model\.origin"):
        find_model(EvaluatedModelConfig(path=checkpoint, origin=Path("gone")), checkpoint / "unused")


def test_a_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; give a Hugging Face folder, a run directory or a checkpoint"):
        find_model(EvaluatedModelConfig(path=tmp_path / "missing"), tmp_path / "hf")
    with pytest.raises(UserError, match="contains no checkpoint of this trainer"):
        find_model(EvaluatedModelConfig(path=tmp_path), tmp_path / "hf")


def test_a_dtype_that_engines_do_not_serve_is_refused_with_a_remedy(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "dtype": "float16"}))
    with pytest.raises(UserError, match=r"the model is in float16; give model\.dtype, one of float32, bfloat16"):
        find_model(EvaluatedModelConfig(path=folder), folder / "hf")
    assert find_model(EvaluatedModelConfig(path=folder, dtype="bfloat16"), folder / "hf").dtype == "bfloat16"


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_responses_longer_than_the_models_context_are_refused(
    folder: Path, checkpoint: Path, is_checkpoint: bool
) -> None:
    source = {"path": checkpoint, "origin": folder} if is_checkpoint else {"path": folder}

    def problems(length: int) -> list[str]:
        tree = {
            "run_dir": folder,
            "model": source,
            "data": {"max_prompt_length": 12, "validation": {"path": "a.jsonl"}},
            "rollout": {"max_response_length": length},
        }
        evaluation = EvalConfig.model_validate(tree)
        return list(find_model(evaluation.model, folder / "hf").problems(evaluation))

    assert problems(500) == []
    assert ["must not exceed the model's max_position_embeddings=512" in each for each in problems(501)] == [True]
