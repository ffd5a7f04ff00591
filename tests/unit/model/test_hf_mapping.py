import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
)

from megatron_bapo.config.architecture import FAMILIES, Architecture, read_architecture
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.hf_export import merge
from megatron_bapo.model.hf_import import local_tensor
from megatron_bapo.model.hf_mapping import (
    entries,
    expected_shapes,
    frozen_tensors,
    global_name,
    is_of_next_token_layer,
    lookup,
    trained_shapes,
)
from megatron_bapo.model.hf_table import TABLE
from megatron_bapo.model.row_layouts import Piece
from megatron_bapo.model.stacked_experts import file_shapes
from megatron_bapo.parallel.megatron import get_gpt_layer_local_spec
from tests.unit.model.shards import architecture, groups_of, parameter_shapes

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mistral": (MistralForCausalLM, MistralConfig),
    "seed_oss": (SeedOssForCausalLM, SeedOssConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig),
    "qwen3_5_text": (Qwen3_5ForCausalLM, Qwen3_5TextConfig),
    "qwen3_5_moe_text": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config),
    "kimi_k2": (DeepseekV3ForCausalLM, DeepseekV3Config),
    "glm4_moe_lite": (Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "mlp_only_layers": [1]}
GLM_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "n_shared_experts": 2}
LATENT = GLM_EXPERTS | {
    "num_key_value_heads": 2,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
}
OF_FAMILY = {
    "mistral": {"sliding_window": None, "head_dim": 6},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 12},
    "qwen3_next": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 12},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 12},
    "glm4_moe": GLM_EXPERTS | {"attention_bias": True, "use_qk_norm": True},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT | {"q_lora_rank": 3},
    "kimi_k2": LATENT | {"q_lora_rank": None},
    "glm4_moe_lite": LATENT | {"q_lora_rank": 3},
}


def test_the_table_has_every_parameter_of_transformer_engines_layers():
    """Compare with the recorded parameters of Megatron-Core 0.19.2 and Transformer Engine 2.20.2.

    They are those of `shards.architecture`, untied. The GPU checks compare the record with the installed versions.
    """
    recorded = json.loads(Path(__file__).with_name("transformer_engine_parameters.json").read_text())
    assert recorded.keys() == FAMILIES.keys()
    for family, parameters in recorded.items():
        arch = architecture(family, tie_word_embeddings=False)
        found = {name: lookup(name, arch) for name in parameters}
        assert {name: list(entry.local_shape(arch, 1)) for name, entry in found.items()} == parameters
        assert sorted(name for entry in found.values() for name in entry.names) == sorted(expected_shapes(arch))


TIES = [(name, tie) for name in MODELS for tie in (True, False) if FAMILIES[name].ties_embeddings or not tie]


@pytest.fixture(scope="module", params=TIES, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that transformers wrote."""
    name, tie = request.param
    model_class, config_class = MODELS[name]
    folder = tmp_path_factory.mktemp(name)
    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    config = config_class(**shape | heads | OF_FAMILY.get(name, {}), tie_word_embeddings=tie)
    model_class(config).save_pretrained(folder)
    return folder


def test_the_expected_names_and_shapes_are_those_that_transformers_writes(checkpoint):
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    assert file_shapes(read_architecture(checkpoint)) == written


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[Architecture, ParallelConfig]:
    """Draw a family with a shape that every layout can split; the vocabulary need not be divisible."""
    tp, pp, vpp = (draw(st.sampled_from([1, 2, 3])) for _ in range(3))
    vpp = 1 if pp == 1 else vpp
    ep, etp = draw(st.sampled_from([(1, tp), (2, 1), (2, 2), (1, 1), (3, 1)]))
    family = draw(st.sampled_from(list(FAMILIES)))
    if not FAMILIES[family].experts:
        ep, etp = 1, tp
    key_value_heads = draw(st.sampled_from([tp, 2 * tp, *(n for n in (1, 2) if tp % n == 0)]))
    shape = {
        "num_hidden_layers": pp * vpp * draw(st.integers(1, 2)),
        "hidden_size": draw(st.integers(1, 3)),
        "intermediate_size": tp * draw(st.integers(1, 3)),
        "num_key_value_heads": key_value_heads,
        "num_attention_heads": math.lcm(tp, key_value_heads) * draw(st.integers(1, 3)),
        "head_dim": 2 * tp,
        "vocab_size": draw(st.integers(1, 9)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if FAMILIES[family].experts:
        layers = st.integers(0, shape["num_hidden_layers"] - 1)
        shape |= {
            "num_experts": ep * draw(st.integers(1, 2)),
            "moe_intermediate_size": etp * draw(st.integers(1, 3)),
            "moe_layers": draw(st.frozensets(layers)),
        }
    if FAMILIES[family].shared_expert:
        shape |= {"shared_expert_intermediate_size": tp * draw(st.integers(1, 3))}
    if FAMILIES[family].gated_delta_net:
        key_heads = tp * draw(st.integers(1, 2))
        shape |= {
            "linear_layers": draw(st.frozensets(st.integers(0, shape["num_hidden_layers"] - 1))),
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": key_heads * draw(st.integers(1, 3)),
            "linear_key_head_dim": draw(st.integers(1, 3)),
            "linear_value_head_dim": draw(st.integers(1, 3)),
            "linear_conv_kernel_dim": draw(st.integers(1, 4)),
        }
    parallel = ParallelConfig(
        # The product of the ranks of both grids, which also covers data parallelism.
        world_size=tp * pp * ep * etp,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    return architecture(family, **shape), parallel


@pytest.mark.slow
@given(models_and_layouts(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_merging_what_all_ranks_read_gives_the_bits_of_the_checkpoint(model_and_layout, transformer_engine):
    arch, parallel = model_and_layout
    generator = torch.Generator().manual_seed(0)
    checkpoint = {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(arch).items()}

    shards = defaultdict(dict)  # Hugging Face names -> rank on the splitting axis -> local tensor
    for rank in range(parallel.world_size):
        groups = groups_of(parallel, rank)
        for name, shape in parameter_shapes(arch, parallel, groups, transformer_engine=transformer_engine):
            entry = lookup(name, arch)
            axis = groups.expert_tensor if entry.row.is_expert else groups.tensor
            if name == "output_layer.weight" and arch.tie_word_embeddings:
                continue
            sources = [checkpoint[hf_name] for hf_name in entry.names]
            local = local_tensor(entry, arch, sources, axis.rank, axis.size)
            assert local.shape == shape == entry.local_shape(arch, axis.size), name
            known = shards[entry.names].setdefault(axis.rank, local)
            assert torch.equal(known, local), f"replicas of {name} differ"

    merged = {}
    for names, by_rank in shards.items():
        (entry,) = (candidate for candidate in entries(arch) if candidate.names == names)
        ranks = [by_rank[rank] for rank in sorted(by_rank)]
        for name, tensor in zip(names, merge(entry, arch, ranks, len(ranks)), strict=True):
            assert name not in merged
            merged[name] = tensor
    assert merged.keys() == checkpoint.keys()
    assert all(torch.equal(merged[name], checkpoint[name]) for name in checkpoint)


def test_padding_rows_of_the_vocabulary_are_zero():
    arch = architecture("llama", vocab_size=5, hidden_size=2)
    table = torch.arange(1.0, 11.0).view(5, 2)
    entry = lookup("embedding.word_embeddings.weight", arch)

    parts = [local_tensor(entry, arch, [table], rank, 4) for rank in range(4)]

    assert arch.padded_vocab_size(4) == 8
    assert torch.equal(torch.cat(parts), torch.cat([table, torch.zeros(3, 2)]))


def test_a_key_value_head_follows_the_query_heads_that_share_it():
    arch = architecture("qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    row = lookup("decoder.layers.0.self_attention.linear_qkv.weight", arch).row

    # Rank 1 holds the second group: query heads 2 and 3, then the second key, then the second value.
    assert row.layout is not None
    assert row.layout(arch, 1, 2) == [Piece(0, 8, 0, 8), Piece(1, 4, 8, 4), Piece(2, 4, 12, 4)]


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.7.mlp.linear_fc1.weight"),
        ("decoder.layers.0.mlp.router.weight", "decoder.layers.6.mlp.router.weight"),
        (
            "decoder.layers.10.mlp.experts.local_experts.3.linear_fc2.weight",
            "decoder.layers.16.mlp.experts.local_experts.11.linear_fc2.weight",
        ),
        ("decoder.layers.2.mlp.experts.linear_fc1.weight13", "decoder.layers.8.mlp.experts.linear_fc1.weight21"),
        ("decoder.layers.2.mlp.experts.linear_fc2.bias0", "decoder.layers.8.mlp.experts.linear_fc2.bias8"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ],
)
def test_layers_and_experts_are_counted_from_the_models_start(local, expected):
    assert global_name(local, layer_offset=6, expert_offset=8) == expected


@pytest.mark.parametrize("name", ["local_experts.11.linear_fc1.weight", "linear_fc1.weight11"])
def test_an_experts_tensors_carry_its_layer_and_its_number(name):
    entry = lookup(f"decoder.layers.7.mlp.experts.{name}", architecture("qwen3_moe"))

    expert = "model.layers.7.mlp.experts.11"
    assert entry.names == (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")
    assert entry.row.is_expert
    assert entry.row.axis == "expert_tensor"


def test_only_experts_are_split_over_the_expert_tensor_axis():
    assert {row.is_expert for row in TABLE if row.axis == "expert_tensor"} == {True}
    assert {row.is_expert for row in TABLE if row.axis == "tensor"} == {False}


def test_transformer_engines_fused_norms_map_to_the_norms_of_the_local_specs():
    """Compare with Megatron's translation of local names to Transformer Engine's names, which its checkpoints use."""
    local_to_fused = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.sharded_state_dict_keys_map

    for local, fused in local_to_fused.items():
        ours, theirs = (lookup(f"decoder.layers.3.{prefix}weight", architecture("llama")) for prefix in (local, fused))
        assert ours == theirs
    assert len(local_to_fused) == 2


def test_frozen_tensors_are_the_routers_biases_and_all_others_are_trained():
    arch = architecture("glm4_moe")
    frozen = frozen_tensors(arch)

    assert frozen == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 2, 3)}
    assert trained_shapes(arch).keys() == expected_shapes(arch).keys() - frozen
    assert [*expected_shapes(arch)][-3:] == sorted(frozen)  # as files need them
    assert not frozen_tensors(architecture("qwen3_moe"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.4.eh_proj.weight", True),
        ("model.layers.5.mlp.gate.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_layers_that_predict_further_tokens_follow_the_last_layer(name, expected):
    assert is_of_next_token_layer(architecture("glm4_moe", num_nextn_predict_layers=1), name) == expected
    assert not is_of_next_token_layer(architecture("glm4_moe"), name)


def test_tensors_of_qwens_multi_token_prediction_have_a_prefix_of_their_own():
    for family, traits in FAMILIES.items():
        arch = architecture(family)
        assert is_of_next_token_layer(arch, "mtp.layers.0.mlp.gate.weight") == traits.gated_delta_net
        assert not is_of_next_token_layer(arch, "model.layers.3.mlp.gate.weight")


def test_a_key_head_of_a_gated_delta_net_keeps_its_values_gates_betas_and_decays():
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5}
    name = "decoder.layers.0.self_attention.in_proj.weight"
    grouped, separate = (
        lookup(name, architecture(family, **sizes, linear_value_head_dim=3)).row
        for family in ("qwen3_next", "qwen3_5_text")
    )

    # A head has a query and a key of 5, two values and two gates of 3, two betas and two decays.
    assert grouped.layout is not None
    assert grouped.layout(architecture("qwen3_next", **sizes, linear_value_head_dim=3), 1, 2) == [
        *(Piece(0, 22, 0, 22), Piece(1, 4, 22, 4))
    ]
    assert separate.layout is not None
    assert separate.layout(architecture("qwen3_5_text", **sizes, linear_value_head_dim=3), 1, 2) == [
        *(Piece(0, 5, 0, 5), Piece(0, 15, 5, 5), Piece(0, 26, 10, 6)),
        *(Piece(1, 6, 16, 6), Piece(2, 2, 22, 2), Piece(3, 2, 24, 2)),
    ]


def test_each_query_head_is_followed_by_its_gate_in_files_and_by_its_groups_others_in_megatron():
    arch = architecture("qwen3_next", num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    row = lookup("decoder.layers.1.self_attention.linear_qkv.weight", arch).row

    # Rank 1 holds the second group: queries 2 and 3, their gates, then the second key and value.
    assert row.layout is not None
    assert row.layout(arch, 1, 2) == [
        *(Piece(0, 16, 0, 4), Piece(0, 24, 4, 4), Piece(0, 20, 8, 4), Piece(0, 28, 12, 4)),
        *(Piece(1, 4, 16, 4), Piece(2, 4, 20, 4)),
    ]


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.shared_experts.fc1.weight", "decoder.layers.0.mlp.router.scale"]
)
def test_the_error_for_a_parameter_without_a_row_names_it(name):
    with pytest.raises(AssertionError, match=rf"no row in .* {name}"):
        lookup(name, architecture("llama"))
