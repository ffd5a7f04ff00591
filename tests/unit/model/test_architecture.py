import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from megatron_bapo.errors import UserError
from megatron_bapo.model.architecture import FAMILIES, Architecture, read_architecture

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def read(folder: Path, config: PretrainedConfig, **changes: object) -> Architecture:
    """What is read from the config.json that transformers writes, with some fields changed."""
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return read_architecture(folder)


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama", LlamaConfig(**SHAPE)), ("qwen2", Qwen2Config(**SHAPE)), ("qwen3", Qwen3Config(**SHAPE, head_dim=16))],
)
def test_the_shape_that_transformers_writes_is_read_back(tmp_path, name, config):
    architecture = read(tmp_path, config)

    assert architecture.family == FAMILIES[name]
    assert {field: getattr(architecture, field) for field in SHAPE} == SHAPE
    assert architecture.head_dim == (16 if name == "qwen3" else 8)
    assert architecture.rms_norm_eps == config.rms_norm_eps


def test_only_qwen2_has_query_biases_and_only_qwen3_normalises_queries():
    assert [name for name, family in FAMILIES.items() if family.qkv_bias] == ["qwen2"]
    assert [name for name, family in FAMILIES.items() if family.qk_norm] == ["qwen3"]


def test_the_rope_base_is_read_where_transformers_writes_it(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 50_000.0}

    assert read(tmp_path, LlamaConfig(**SHAPE, rope_parameters=rope)).rope_theta == 50_000.0
    assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text())


def test_the_rope_base_is_read_where_older_checkpoints_have_it(tmp_path):
    assert read(tmp_path, LlamaConfig(**SHAPE), rope_parameters=None, rope_theta=1e6).rope_theta == 1e6


def test_without_key_value_heads_every_head_has_its_own(tmp_path):
    assert read(tmp_path, LlamaConfig(**SHAPE), num_key_value_heads=None).num_key_value_heads == 4


@pytest.mark.parametrize("tie", [True, False])
def test_tied_embeddings_are_read(tmp_path, tie):
    assert read(tmp_path, Qwen3Config(**SHAPE, tie_word_embeddings=tie)).tie_word_embeddings is tie


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mixtral"),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("attention_bias", True),
        ("use_sliding_window", True),
        ("attention_dropout", 0.1),
    ],
)
def test_a_value_that_the_trainer_cannot_honour_is_refused_by_field_and_value(tmp_path, field, value):
    with pytest.raises(UserError, match=rf"{field} is {value!r}"):
        read(tmp_path, LlamaConfig(**SHAPE), **{field: value})


@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_rope_scaling_is_refused_under_every_name_it_has_had(tmp_path, field, kind):
    config = LlamaConfig(**SHAPE)
    changes = {"rope_parameters": None, field: {kind: "linear", "factor": 2.0, "rope_theta": 1e4}}

    with pytest.raises(UserError, match=r"RoPE scaling .*'linear'.* is not supported"):
        read(tmp_path, config, **changes)


def test_a_folder_without_config_names_the_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"config\.json does not exist; model\.path must be"):
        read_architecture(tmp_path)
