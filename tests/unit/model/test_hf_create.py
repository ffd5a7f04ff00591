from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.config.model import CreateModelConfig
from megatron_bapo.model.hf_create import END_OF_SEQUENCE, byte_tokenizer, create_checkpoint

PROMPTS = ["Spell this word backward: abc", "Spell this word backward: dog", "Spell this word backward: tree"]
BEGINNING = "Spell this word backward: "
SETTINGS = CreateModelConfig(
    num_hidden_layers=1,
    hidden_size=16,
    intermediate_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
TOKENIZER = byte_tokenizer(PROMPTS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("create") / "model"
    create_checkpoint(folder, SETTINGS, PROMPTS, seed=1)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_arguments_give_the_same_bytes(checkpoint, tmp_path):
    create_checkpoint(tmp_path / "model", SETTINGS, PROMPTS, seed=1)

    assert contents(tmp_path / "model") == contents(checkpoint)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(checkpoint, tmp_path):
    create_checkpoint(tmp_path / "model", SETTINGS, PROMPTS, seed=2)

    first, second = contents(checkpoint), contents(tmp_path / "model")
    assert [name for name in first if first[name] != second[name]] == ["model.safetensors"]


def test_a_half_written_folder_of_a_killed_run_is_replaced(tmp_path):
    partial = tmp_path / "model.partial"
    partial.mkdir()
    (partial / "leftover").touch()

    create_checkpoint(tmp_path / "model", SETTINGS, PROMPTS, seed=1)

    assert not partial.exists()
    assert not (tmp_path / "model" / "leftover").exists()


def test_an_earlier_model_in_the_folder_is_replaced(tmp_path):
    for seed in (1, 2):
        create_checkpoint(tmp_path / "model", SETTINGS, PROMPTS, seed=seed)
    create_checkpoint(tmp_path / "other", SETTINGS, PROMPTS, seed=2)

    assert contents(tmp_path / "model") == contents(tmp_path / "other")


def test_transformers_loads_model_and_tokenizer_from_the_folder_alone(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)

    assert tokenizer.encode(PROMPTS[0]) == TOKENIZER.encode(PROMPTS[0])
    assert tokenizer.eos_token_id == model.config.eos_token_id == TOKENIZER.eos_token_id
    assert len(tokenizer) <= model.config.vocab_size


def test_the_trainer_reads_the_shape_that_was_asked_for(checkpoint):
    architecture = read_architecture(checkpoint)

    for field in ("num_hidden_layers", "num_attention_heads", "head_dim", "vocab_size", "tie_word_embeddings"):
        assert getattr(architecture, field) == getattr(SETTINGS, field), field


@given(st.text(max_size=40))
def test_encoding_and_decoding_preserve_any_text(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text(st.characters(exclude_characters="<S", codec="utf-8"), max_size=40))
def test_text_without_the_added_tokens_is_one_token_a_byte(text):
    assert len(TOKENIZER.encode(text)) == len(text.encode())


def test_the_common_prefix_of_all_prompts_is_one_token():
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(PROMPTS[1])) == [BEGINNING, "d", "o", "g"]


def test_digits_that_all_prompts_share_stay_single_tokens():
    tokenizer = byte_tokenizer(["Add 17 and 5", "Add 12 and 9"])

    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("Add 17"))[0] == "Add "


def test_prompts_with_nothing_in_common_add_only_the_end_of_sequence():
    assert len(byte_tokenizer(["abc", "xyz"])) == 257
    assert len(TOKENIZER) == 258


def test_the_end_of_sequence_is_left_out_of_decoded_text():
    token_ids = [*TOKENIZER.encode("god"), TOKENIZER.eos_token_id]

    assert TOKENIZER.decode(token_ids, skip_special_tokens=True) == "god"
    assert TOKENIZER.decode(token_ids) == f"god{END_OF_SEQUENCE}"
