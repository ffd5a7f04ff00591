from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron_bapo.errors import UserError
from megatron_bapo.model.architecture import FAMILIES, Architecture, read_architecture
from megatron_bapo.model.hf_import import check_names
from megatron_bapo.model.hf_mapping import TABLE, Piece, expected_names, lookup

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
SPLIT_ROWS = [row for row in TABLE if row.layout is not None]


def architecture(
    tp: int, key_value_heads: int, heads_per_group: int, head_dim: int, intermediate: int, vocab: int
) -> Architecture:
    """A shape that `tp` ranks can share."""
    return Architecture(
        family=FAMILIES["qwen2"],
        num_hidden_layers=2,
        hidden_size=8,
        intermediate_size=intermediate * tp,
        num_attention_heads=key_value_heads * tp * heads_per_group,
        num_key_value_heads=key_value_heads * tp,
        head_dim=head_dim,
        vocab_size=vocab * tp,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=False,
    )


def split_sizes(arch: Architecture) -> dict[str, int]:
    """Length of each Hugging Face tensor along the dimension that tensor parallelism splits."""
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
    sizes = dict.fromkeys(("embed_tokens", "lm_head"), arch.vocab_size)
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), arch.intermediate_size)
    return sizes | {"q_proj": queries, "o_proj": queries, "k_proj": keys, "v_proj": keys}


@given(
    tp=st.sampled_from([1, 2, 3, 4, 8]),
    key_value_heads=st.integers(1, 3),
    heads_per_group=st.integers(1, 4),
    head_dim=st.integers(1, 6),
    intermediate=st.integers(1, 9),
    vocab=st.integers(1, 9),
)
def test_every_row_lies_on_one_rank_and_every_local_row_comes_from_one_place(tp, **shape):
    arch = architecture(tp, **shape)
    sizes = split_sizes(arch)
    for row in SPLIT_ROWS:
        pieces = [row.layout(arch, rank, tp) for rank in range(tp)]
        totals = [sizes[name.split(".")[-2]] for name in row.hugging_face]

        for part, total in enumerate(totals):
            given_out = [i for rank in pieces for p in rank if p.part == part for i in indices(p.hf_start, p)]
            assert sorted(given_out) == list(range(total)), row.megatron
        for rank in pieces:
            filled = [i for p in rank for i in indices(p.local_start, p)]
            assert sorted(filled) == list(range(sum(totals) // tp)), row.megatron


def indices(start: int, piece: Piece) -> range:
    return range(start, start + piece.size)


def test_a_key_value_head_follows_the_query_heads_that_share_it():
    arch = architecture(tp=2, key_value_heads=1, heads_per_group=2, head_dim=4, intermediate=1, vocab=1)
    row, _ = lookup("decoder.layers.0.self_attention.linear_qkv.weight", 0)

    # Rank 1 holds the second group: query heads 2 and 3, then the second key, then the second value.
    assert row.layout(arch, 1, 2) == [Piece(0, 8, 0, 8), Piece(1, 4, 8, 4), Piece(2, 4, 12, 4)]


def test_layers_of_a_later_pipeline_stage_are_counted_from_the_models_start():
    _, names = lookup("decoder.layers.1.mlp.linear_fc1.weight", layer_offset=6)

    assert names == ("model.layers.7.mlp.gate_proj.weight", "model.layers.7.mlp.up_proj.weight")


def test_a_parameter_without_a_row_is_named():
    with pytest.raises(AssertionError, match=r"no row in .* decoder\.layers\.0\.mlp\.router\.weight"):
        lookup("decoder.layers.0.mlp.router.weight", 0)


@pytest.fixture(scope="module", params=[(name, tie) for name in MODELS for tie in (True, False)], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that transformers wrote."""
    name, tie = request.param
    model_class, config_class = MODELS[name]
    folder = tmp_path_factory.mktemp(name)
    config = config_class(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=tie,
    )
    model_class(config).save_pretrained(folder)
    return folder


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_the_expected_tensors_are_those_that_transformers_writes(checkpoint):
    assert expected_names(read_architecture(checkpoint)) == names_in(checkpoint)


def test_a_missing_and_a_surplus_tensor_are_each_refused_by_name(checkpoint):
    arch, names = read_architecture(checkpoint), names_in(checkpoint)

    with pytest.raises(UserError, match=r"lacks 1 tensors that config.json calls for, first model\.norm\.weight"):
        check_names(names - {"model.norm.weight"}, arch, checkpoint)
    with pytest.raises(UserError, match=r"holds 1 tensors that the architecture has no place for, first score\.weight"):
        check_names(names | {"score.weight"}, arch, checkpoint)


def test_what_old_exports_repeat_is_ignored(checkpoint):
    arch = read_architecture(checkpoint)
    repeated = {"model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"}

    check_names(expected_names(arch) | repeated, arch, checkpoint)
