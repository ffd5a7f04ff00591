from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_bapo.config.checks import check_config
from megatron_bapo.config.loading import dump_config, load_config
from megatron_bapo.model.hf_create import byte_tokenizer

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands in for a pretrained model: a Llama that every shipped layout can split."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    byte_tokenizer(["abc", "xyz"]).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_keeps_every_rule_without_a_warning(path, checkpoint):
    """A small checkpoint stands in for the pretrained one, which is downloaded separately."""
    config = load_config(path)
    overrides = [] if config.model.path is None else [f"model.path={checkpoint}"]
    overrides += [] if config.algorithm.distillation is None else [f"algorithm.distillation.teacher={checkpoint}"]

    assert check_config(load_config(path, overrides)) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_survives_being_written_out(path, tmp_path):
    config = load_config(path)
    (tmp_path / "config.yaml").write_text(dump_config(config))

    assert load_config(tmp_path / "config.yaml") == config
    assert config.run_dir.name == path.stem
