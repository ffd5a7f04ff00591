import json
import math
from pathlib import Path

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)

from megatron_bapo.config.architecture import FAMILIES, Architecture, read_architecture
from megatron_bapo.errors import UserError

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "mistral": MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "seed_oss": SeedOssConfig(**SHAPE, head_dim=16),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16),
    "qwen3_next": Qwen3NextConfig(**SHAPE | EXPERTS | LINEAR, head_dim=16, shared_expert_intermediate_size=20),
    "qwen3_5_text": Qwen3_5TextConfig(**SHAPE | LINEAR, head_dim=16),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(
        **SHAPE | EXPERTS | LINEAR, head_dim=16, shared_expert_intermediate_size=20
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE, head_dim=8, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=12, n_shared_experts=2
    ),
    "gpt_oss": GptOssConfig(**SHAPE, head_dim=8, num_local_experts=8, num_experts_per_tok=2, sliding_window=16),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=20),
    "deepseek_v3": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4}, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=12,
        n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=2, q_lora_rank=12, kv_lora_rank=10,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, scoring_func="sigmoid", topk_method="noaux_tc",
    ),
}  # fmt: skip
CONFIGS["kimi_k2"] = CONFIGS["deepseek_v3"]
CONFIGS["glm4_moe_lite"] = Glm4MoeLiteConfig(
    **SHAPE | {"num_key_value_heads": 4}, n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=12,
    n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6,
    qk_rope_head_dim=4, v_head_dim=10, topk_method="noaux_tc",
)  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN_OF_GPT_OSS = {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, config: PretrainedConfig, absent: tuple[str, ...] = (), **changes: object) -> Architecture:
    """Read the config.json that transformers writes, with some fields changed."""
    config.save_pretrained(folder)
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in fields.items() if name not in absent}))
    return read_architecture(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shape_that_transformers_writes_is_read_back(tmp_path, name):
    architecture = read(tmp_path, CONFIGS[name], model_type=name)

    assert architecture.family == FAMILIES[name]
    of_latent = {"num_key_value_heads": 4} if FAMILIES[name].latent_attention else {}
    assert {field: getattr(architecture, field) for field in SHAPE} == SHAPE | of_latent
    assert architecture.head_dim == (
        16 if name.startswith(("qwen3", "mistral", "seed_oss")) else 10 if of_latent else 8
    )
    assert architecture.rms_norm_eps == CONFIGS[name].rms_norm_eps
    scaled = {"rope_type": "yarn", **YARN_OF_GPT_OSS} if name == "gpt_oss" else {}
    assert architecture.rope_scaling == scaled


def test_which_families_have_query_biases_normalise_queries_and_have_experts():
    assert [name for name, family in FAMILIES.items() if family.qkv_bias] == [
        *("seed_oss", "qwen2", "qwen2_moe", "gpt_oss")
    ]
    assert [name for name, family in FAMILIES.items() if family.qk_norm] == [
        *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    ]
    assert [name for name, family in FAMILIES.items() if family.experts] == [
        *("qwen3_moe", "qwen2_moe", "qwen3_next", "qwen3_5_moe_text", "glm4_moe", "gpt_oss"),
        *("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
    ]


def test_the_width_of_the_shared_expert_is_read(tmp_path):
    assert read(tmp_path, CONFIGS["qwen2_moe"]).shared_expert_intermediate_size == 20
    assert read(tmp_path, CONFIGS["qwen2_moe"], num_experts=0).shared_expert_intermediate_size == 0


def test_glms_router_shared_expert_and_share_of_rotated_dimensions_are_read(tmp_path):
    changes = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 2}
    architecture = read(tmp_path, CONFIGS["glm4_moe"], **changes)

    assert (architecture.num_experts, architecture.num_experts_per_tok) == (8, 4)
    assert (architecture.n_group, architecture.topk_group, architecture.routed_scaling_factor) == (4, 2, 2.5)
    assert architecture.moe_layers == {2, 3, 4, 5}
    assert architecture.shared_expert_intermediate_size == 2 * 12
    assert architecture.rotary_dim == 4
    assert architecture.num_nextn_predict_layers == 1


@pytest.mark.parametrize("bias", [True, False])
def test_seed_oss_has_biases_unless_its_config_says_otherwise_and_dropout_that_is_not_applied(tmp_path, bias):
    assert CONFIGS["seed_oss"].attention_dropout == CONFIGS["seed_oss"].residual_dropout == 0.1
    assert read(tmp_path, CONFIGS["seed_oss"], attention_bias=bias).family.qkv_bias == bias
    assert read(tmp_path, CONFIGS["seed_oss"], absent=("attention_bias",)).family.qkv_bias
    with pytest.raises(
        UserError, match="attention_out_bias is True, which the trainer does not support; it must be False"
    ):
        read(tmp_path, CONFIGS["seed_oss"], attention_out_bias=True)


@pytest.mark.parametrize("family", ["qwen3", "seed_oss"])
def test_a_head_size_of_null_is_not_read_as_the_familys_default(tmp_path, family):
    with pytest.raises(UserError, match="head_dim is None, which transformers does not read as a missing one, 128"):
        read(tmp_path, CONFIGS[family], head_dim=None)


@pytest.mark.parametrize(("bias", "norm"), [(True, False), (True, True), (False, True)])
def test_glms_biases_and_norms_of_queries_are_read(tmp_path, bias, norm):
    family = read(tmp_path, CONFIGS["glm4_moe"], attention_bias=bias, use_qk_norm=norm).family
    assert (family.qkv_bias, family.qk_norm) == (bias, norm)


def test_the_share_of_rotated_dimensions_is_read_where_older_checkpoints_have_it(tmp_path):
    older = {"rope_parameters": None, "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    assert read(tmp_path, CONFIGS["glm4_moe"], **older).rotary_dim == 2
    assert read(tmp_path, CONFIGS["glm4_moe"], **older | {"partial_rotary_factor": None}).rotary_dim == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"norm_topk_prob": False},
            "norm_topk_prob is False with num_experts_per_tok=4, but Megatron's sigmoid router",
        ),
        ({"n_routed_experts": 0}, "n_routed_experts is 0; it must be a positive whole number"),
        ({"n_routed_experts": None}, "n_routed_experts is missing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must not exceed n_routed_experts=8"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but vLLM serves glm4_moe only with an output"),
        ({"attention_bias": True, "qkv_bias": False}, "qkv_bias is False, .* it must be True"),
        ({"n_group": 3}, "n_group is 3 with n_routed_experts=8 and topk_group=1; it must divide the experts"),
        ({"n_group": 2, "topk_group": 4}, "n_group is 2 .* and be at least topk_group"),
        ({"n_group": 4, "topk_group": 1}, "topk_group is 1 of 4 groups .* by its 4 best experts, and the model by 2"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0; it must be a positive number"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; it must be a whole number of at least 0"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0; it must be a positive whole number"),
        ({"rope_parameters": {"partial_rotary_factor": 2}}, "partial_rotary_factor is 2; it must be a number above 0"),
        ({"rope_parameters": YARN}, "partial_rotary_factor is 0.5 with the RoPE type 'yarn'"),
    ],
)
def test_what_megatrons_sigmoid_router_or_partial_rope_cannot_do_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, CONFIGS["glm4_moe"], **changes)


def test_the_widths_of_latent_attention_are_read(tmp_path):
    arch = read(tmp_path, CONFIGS["deepseek_v3"])
    assert (arch.q_lora_rank, arch.kv_lora_rank, arch.qk_nope_head_dim, arch.qk_rope_head_dim) == (12, 10, 6, 4)
    assert (arch.value_dim, arch.rotary_dim, arch.cached_dim, arch.attention_width) == (5, 4, 14, 4 * (10 + 5) // 2)
    assert arch.moe_layers == {2, 3, 4, 5}
    assert read(tmp_path, CONFIGS["deepseek_v3"], q_lora_rank=None).q_lora_rank == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"q_lora_rank": -1}, "q_lora_rank is -1; it must be a positive whole number"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, but in latent attention .* num_attention_heads=4"),
        ({"v_head_dim": 11}, "v_head_dim is 11, .* at most qk_nope_head_dim [+] qk_rope_head_dim = 10"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', .* it must be 'sigmoid'"),
        ({"topk_method": None}, "topk_method is None, .* it must be 'noaux_tc'"),
        ({"rope_interleave": False}, "rope_interleave is False, .* it must be True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2, .* it must be 1"),
        ({"n_group": None}, "n_group is missing"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace is missing"),
        ({"rope_parameters": YARN}, "rope_parameters.mscale is missing, but the RoPE type 'yarn' requires it"),
        (
            {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0}},
            "rope_parameters.mscale_all_dim is 0; it must be a positive number",
        ),
        ({"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor is not supported with .* 'yarn'"),
        ({"rope_parameters": LLAMA3}, "the type 'llama3', .* it must be one of default, yarn"),
    ],
)
def test_what_latent_attention_or_its_router_cannot_do_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, CONFIGS["deepseek_v3"], **changes)


@pytest.mark.parametrize("absent", [(), ("mlp_layer_types",)])
def test_glm_lite_has_deepseeks_attention_and_experts_behind_the_first_layer(tmp_path, absent):
    arch = read(tmp_path, CONFIGS["glm4_moe_lite"], absent=absent)
    assert (arch.q_lora_rank, arch.kv_lora_rank, arch.head_dim, arch.value_dim) == (12, 10, 10, 10)
    assert (arch.num_experts, arch.routed_scaling_factor, arch.shared_expert_intermediate_size) == (8, 1.8, 24)
    assert arch.moe_layers == {1, 2, 3, 4, 5}
    kinds = ["dense", "dense", *["sparse"] * 4]
    dense = read(tmp_path, CONFIGS["glm4_moe_lite"], first_k_dense_replace=2, mlp_layer_types=kinds)
    assert dense.moe_layers == {2, 3, 4, 5}


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({"first_k_dense_replace": 2}, ()),
        ({"first_k_dense_replace": 2}, ("mlp_layer_types",)),
        ({"mlp_layer_types": ["dense", "sparse"]}, ()),
        ({"mlp_layer_types": ["dense", *["sparse"] * 4, "dense"]}, ()),
    ],
)
def test_layers_with_experts_that_differ_between_transformers_and_vllm_are_refused(tmp_path, changes, absent):
    with pytest.raises(UserError, match=r"mlp_layer_types is .* with first_k_dense_replace=[12], of which"):
        read(tmp_path, CONFIGS["glm4_moe_lite"], absent=absent, **changes)


def test_gpt_oss_has_experts_in_all_layers_and_windows_in_every_second_one(tmp_path):
    arch = read(tmp_path, CONFIGS["gpt_oss"])
    assert arch.moe_layers == frozenset(range(6))
    assert (arch.num_experts, arch.num_experts_per_tok, arch.moe_intermediate_size) == (8, 2, 48)
    assert arch.norm_topk_prob
    assert [arch.window(layer) for layer in range(6)] == [16, None] * 3
    assert (arch.rope_theta, arch.context_length) == (150000.0, 32 * 4096)
    assert read(tmp_path, CONFIGS["gpt_oss"], absent=("layer_types",)) == arch
    kinds = {"sliding_attention": 16, "full_attention": None}
    assert [kinds[kind] for kind in CONFIGS["gpt_oss"].layer_types] == [arch.window(layer) for layer in range(6)]


def test_the_pairs_of_tokens_that_attention_computes_are_fewer_with_windows(tmp_path):
    arch = read(tmp_path, CONFIGS["gpt_oss"])
    assert arch.attended(100.0, 100.0**2) == (100.0**2 + 2 * 16 * 100.0) / 2
    assert arch.attended(8.0, 64.0) == 64.0  # shorter than the window
    assert read(tmp_path, CONFIGS["qwen3"]).attended(100.0, 100.0**2) == 100.0**2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be a positive whole number"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 3}, "layer_types is .*; it must be 'sliding_attent"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "layer_types has 2 layers; it must have num_hidden_l",
        ),
        ({"attention_bias": False}, "attention_bias is False, which vLLM does not read for gpt_oss; it must be True"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, which vLLM does not read for gpt_oss; it must be 1e-05"),
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0, which vLLM does not read for gpt_oss; it must be 7.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0, which vLLM does not read for gpt_oss; it must be 1.702"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but vLLM serves gpt_oss only with an output"),
        ({"num_local_experts": 0}, "num_local_experts is 0; it must be a positive whole number"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob is True with num_experts_per_tok=1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "to bfloat16 with tools/dequantize_mxfp4.py"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "the type 'default', .* must be one of yarn",
        ),
        ({"rope_parameters": {"rope_type": "yarn", **YARN_OF_GPT_OSS}}, "rope_theta is missing"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "yarn", **YARN_OF_GPT_OSS, "beta_fast": None}},
            "rope_parameters.beta_fast is missing",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "yarn", **YARN_OF_GPT_OSS, "mscale": 1.0}},
            "rope_parameters.mscale is not supported with the RoPE type 'yarn'",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "yarn", **YARN_OF_GPT_OSS, "truncate": 1}},
            "rope_parameters.truncate is 1; it must be true or false",
        ),
    ],
)
def test_what_vllm_computes_in_another_way_than_a_config_of_gpt_oss_says_is_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, CONFIGS["gpt_oss"], **changes)


def test_fields_that_glms_config_leaves_out_have_the_values_of_transformers(tmp_path):
    absent = ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace", "norm_topk_prob")
    architecture, theirs = read(tmp_path, CONFIGS["glm4_moe"], absent=absent), Glm4MoeConfig()
    assert (architecture.n_group, architecture.topk_group) == (theirs.n_group, theirs.topk_group)
    assert architecture.routed_scaling_factor == theirs.routed_scaling_factor
    assert architecture.norm_topk_prob == theirs.norm_topk_prob
    assert min(architecture.moe_layers) == theirs.first_k_dense_replace


@pytest.mark.parametrize(("name", "has"), [("qwen3_moe", True), ("qwen3", True), ("llama", False), ("qwen2", False)])
def test_norms_of_queries_that_the_family_has_whatever_the_field_says_are_accepted(tmp_path, name, has):
    """Qwen3-Coder's config.json has `use_qk_norm`, which neither transformers nor vLLM reads."""
    for value in (has, None):
        assert read(tmp_path, CONFIGS[name], use_qk_norm=value).family.qk_norm == has
    with pytest.raises(UserError, match=f"use_qk_norm is {not has}, .* it must be {has}"):
        read(tmp_path, CONFIGS[name], use_qk_norm=not has)


@pytest.mark.parametrize("field", ["first_k_dense_replace", "routed_scaling_factor"])
def test_a_field_that_deepseeks_config_lacks_is_named(tmp_path, field):
    with pytest.raises(UserError, match=f"{field} is missing"):
        read(tmp_path, CONFIGS["deepseek_v3"], absent=(field,))


@pytest.mark.parametrize("kind", [["yarn"], {"yarn": 1}, 1])
def test_a_rope_type_that_is_no_text_is_named(tmp_path, kind):
    with pytest.raises(UserError, match=r"rope_parameters has the type .*; it must be one of default"):
        read(tmp_path, CONFIGS["llama"], rope_parameters={"rope_type": kind, "rope_theta": 1e4})


@pytest.mark.parametrize(("name", "value"), [("llama", True), ("mistral", True), ("qwen3", True), ("qwen2", False)])
def test_biases_that_the_family_has_not_are_refused(tmp_path, name, value):
    assert read(tmp_path, CONFIGS[name], qkv_bias=not value).family == FAMILIES[name]
    with pytest.raises(UserError, match=f"qkv_bias is {value}, .* it must be {not value}"):
        read(tmp_path, CONFIGS[name], qkv_bias=value)


@pytest.mark.parametrize(("field", "value"), [("shared_expert_intermediate_size", 0), ("qkv_bias", False)])
def test_a_qwen2_moe_model_without_its_shared_expert_or_biases_is_refused(tmp_path, field, value):
    with pytest.raises(UserError, match=f"{field} is {value}"):
        read(tmp_path, CONFIGS["qwen2_moe"], **{field: value})


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_experts_are_read_under_both_names_that_transformers_has_given_them(tmp_path, spelling):
    absent = ("num_experts", "num_local_experts")
    fields = {"absent": tuple(name for name in absent if name != spelling), spelling: 8}
    architecture = read(tmp_path, CONFIGS["qwen3_moe"], **fields)

    assert {field: getattr(architecture, field) for field in EXPERTS} == EXPERTS
    assert architecture.moe_layers == frozenset(range(6))
    assert not architecture.has_dense_layers


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"decoder_sparse_step": 2}, {1, 3, 5}),
        ({"mlp_only_layers": [0, 4]}, {1, 2, 3, 5}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, {5}),
        ({"decoder_sparse_step": 7}, set()),
        ({"num_experts": 0}, set()),
    ],
)
def test_the_layers_with_experts_are_those_of_transformers(tmp_path, changes, layers):
    architecture = read(tmp_path, CONFIGS["qwen3_moe"], **changes)

    assert architecture.moe_layers == layers
    assert architecture.has_dense_layers
    assert architecture.num_experts == (8 if layers else 0)


def test_the_rope_base_is_read_where_transformers_writes_it(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 50_000.0}

    assert read(tmp_path, LlamaConfig(**SHAPE, rope_parameters=rope)).rope_theta == 50_000.0
    assert "rope_theta" not in json.loads((tmp_path / "config.json").read_text())


def test_the_rope_base_is_read_where_older_checkpoints_have_it(tmp_path):
    assert read(tmp_path, CONFIGS["llama"], rope_parameters=None, rope_theta=1e6).rope_theta == 1e6


@pytest.mark.parametrize(
    "scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}], ids=lambda s: s["rope_type"]
)
@pytest.mark.parametrize("kind", ["rope_type", "type"])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_rope_scaling_is_read_under_every_name_it_has_had(tmp_path, field, kind, scaling):
    spelt = {kind if name == "rope_type" else name: value for name, value in scaling.items()}
    changes = {"rope_parameters": None, "rope_theta": 1e6, field: spelt}

    architecture = read(tmp_path, CONFIGS["qwen2"], **changes)

    assert architecture.rope_scaling == scaling
    assert architecture.rope_theta == 1e6


def test_yarn_multiplies_the_original_context_length(tmp_path):
    """Qwen's recipe leaves max_position_embeddings unchanged; other RoPE types have the whole length there."""
    recipe = {"rope_parameters": None, "rope_theta": 1e6, "max_position_embeddings": 40960}

    assert read(tmp_path, CONFIGS["qwen3"], **recipe, rope_scaling=YARN).context_length == 131072
    assert read(tmp_path, CONFIGS["qwen3"], **recipe, rope_scaling=LLAMA3).context_length == 40960
    assert read(tmp_path, CONFIGS["qwen3"], **recipe).context_length == 40960


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            r"rope_scaling has the type 'dynamic', .*default, linear, llama3, yarn",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "rope_scaling has the type 'longrope'"),
        ({"rope_type": "yarn", "factor": 4.0}, r"rope_scaling\.original_max_position_embeddings is missing"),
        ({**LLAMA3, "low_freq_factor": None}, r"rope_scaling\.low_freq_factor is missing"),
        ({**YARN, "attn_factor": 0.8}, "attn_factor is 0.8, which neither transformers nor vLLM reads; remove it to"),
        ({**YARN, "mrope_section": [1, 2]}, r"rope_scaling\.mrope_section is not supported with the RoPE type 'yarn'"),
        ({**LLAMA3, "attention_factor": 2.0}, r"rope_scaling\.attention_factor is not supported with .*'llama3'"),
        ({"type": "default", "mrope_section": [1]}, r"rope_scaling\.mrope_section is not supported"),
        ({**YARN, "partial_rotary_factor": 0.5}, r"rope_scaling\.partial_rotary_factor is 0\.5"),
    ],
)
def test_an_unsupported_rope_setting_is_refused_by_its_field(tmp_path, scaling, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, CONFIGS["llama"], rope_parameters=None, rope_scaling=scaling)


def test_rope_settings_in_two_fields_are_refused(tmp_path):
    with pytest.raises(UserError, match="rope_scaling and rope_parameters are both given"):
        read(tmp_path, CONFIGS["llama"], rope_scaling=YARN)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_moe"])
def test_without_key_value_heads_every_head_has_its_own(tmp_path, family):
    assert read(tmp_path, CONFIGS[family], num_key_value_heads=None).num_key_value_heads == 4


def test_only_llama_configs_may_omit_the_number_of_key_value_heads(tmp_path):
    absent = ("num_key_value_heads",)

    assert read(tmp_path, CONFIGS["llama"], absent).num_key_value_heads == 4
    for family in ("qwen2", "mistral"):
        with pytest.raises(UserError, match="num_key_value_heads is missing"):
            read(tmp_path, CONFIGS[family], absent)


@pytest.mark.parametrize("family", ["mistral", "qwen3_moe", "glm4_moe"])
def test_families_whose_configuration_in_transformers_refuses_null_need_the_number_of_key_value_heads(tmp_path, family):
    with pytest.raises(UserError, match="num_key_value_heads is missing"):
        read(tmp_path, CONFIGS[family], num_key_value_heads=None)
    with pytest.raises(StrictDataclassFieldValidationError, match="num_key_value_heads"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("family", "head_dim"),
    [("llama", 8), ("mistral", 8), ("seed_oss", 128), ("qwen2", 8), ("qwen3", 128), ("qwen3_moe", 8)],
)
def test_a_missing_head_size_is_the_familys_default(tmp_path, family, head_dim):
    config_class = type(CONFIGS[family])

    assert read(tmp_path, CONFIGS[family], ("head_dim",)).head_dim == head_dim
    default = config_class(**SHAPE)
    assert (getattr(default, "head_dim", None) or default.hidden_size // default.num_attention_heads) == head_dim


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
        ("bias", True),
        ("use_sliding_window", True),
        ("sliding_window", 4096),
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("llama_4_scaling", {"beta": 0.1}),
        ("ada_rms_norm_t_cond", True),
        ("attention_out_bias", True),
        ("residual_dropout", 0.1),
        ("is_causal", False),
        ("logit_scale", 0.5),
        ("attention_dropout", 0.1),
        ("partial_rotary_factor", 0.5),
        ("use_mrope", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("shared_expert_intermediate_size", 64),
        ("n_shared_experts", 1),
        ("num_nextn_predict_layers", 1),
    ],
)
def test_an_unsupported_value_is_refused_with_its_field(tmp_path, field, value):
    with pytest.raises(UserError) as caught:
        read(tmp_path, CONFIGS["llama"], **{field: value})

    assert f"{tmp_path / 'config.json'}: {field} is {value!r}" in str(caught.value)


def test_the_message_about_quantized_weights_is_short(tmp_path):
    """Published FP8 models list hundreds of modules that are not quantized."""
    modules = [f"model.layers.{layer}.mlp.gate" for layer in range(200)]
    with pytest.raises(
        UserError, match=r"quantization_config is {'modules_to_not_convert': .*it must be None"
    ) as caught:
        read(tmp_path, CONFIGS["qwen3"], quantization_config={"quant_method": "fp8", "modules_to_not_convert": modules})
    assert len(str(caught.value).removeprefix(str(tmp_path))) < 400


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.alternating_windows])
def test_a_window_is_refused_where_vllm_uses_it_without_use_sliding_window(tmp_path, name):
    changes = {"model_type": name, "sliding_window": 8, "use_sliding_window": False}
    if "sliding_window" in FAMILIES[name].own_fields and FAMILIES[name].default_sliding_window is None:
        read(tmp_path, CONFIGS[name], **changes)
        assert not AutoConfig.from_pretrained(tmp_path).sliding_window
    else:
        with pytest.raises(UserError, match="sliding_window is 8, which the trainer does not support; it must be None"):
            read(tmp_path, CONFIGS[name], **changes)
    assert read(tmp_path, CONFIGS[name], model_type=name, sliding_window=None).family == FAMILIES[name]


def test_mistrals_missing_window_is_refused_because_transformers_and_vllm_have_a_default(tmp_path):
    message = f"sliding_window is missing, .* a window of {MistralConfig().sliding_window} tokens, .* has null there"
    with pytest.raises(UserError, match=message):
        read(tmp_path, CONFIGS["mistral"], absent=("sliding_window",))


def test_mistrals_window_of_0_is_refused_because_only_vllm_reads_it_as_none(tmp_path):
    with pytest.raises(UserError, match="sliding_window is 0, which the trainer does not support; it must be None"):
        read(tmp_path, CONFIGS["mistral"], sliding_window=0)
    assert read(tmp_path, CONFIGS["llama"], sliding_window=0).family == FAMILIES["llama"]


def test_sliding_window_layers_are_refused_even_if_use_sliding_window_is_false(tmp_path):
    kinds = ["full_attention", "sliding_attention"] * 3

    with pytest.raises(UserError, match=r"layer_types has 'sliding_attention', which the trainer does not support"):
        read(tmp_path, CONFIGS["qwen3"], layer_types=kinds, use_sliding_window=False)


@pytest.mark.parametrize("field", [*SHAPE, "rms_norm_eps"])
def test_a_missing_field_is_named_with_its_file(tmp_path, field):
    with pytest.raises(UserError) as caught:
        read(tmp_path, CONFIGS["qwen2"], absent=(field,))

    assert f"{tmp_path / 'config.json'}: {field} is missing; use the checkpoint's original" in str(caught.value)


@pytest.mark.parametrize("field", [name for name in EXPERTS if name != "norm_topk_prob"])
def test_a_missing_field_of_the_experts_is_named(tmp_path, field):
    with pytest.raises(UserError, match=f"{field} is missing"):
        read(tmp_path, CONFIGS["qwen3_moe"], **{"num_experts": 8, "num_local_experts": None, field: None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"),
        ("vocab_size", 0),
        ("num_hidden_layers", 2.0),
        ("head_dim", -8),
        ("num_nextn_predict_layers", "1"),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", math.inf),
    ],
)
def test_a_size_that_is_not_a_positive_number_is_refused(tmp_path, field, value):
    with pytest.raises(UserError, match=rf"{field} is {value!r}; it must be a positive"):
        read(tmp_path, CONFIGS["glm4_moe"], **{field: value})


@pytest.mark.parametrize("field", [*SHAPE, "head_dim", *(name for name in EXPERTS if name != "norm_topk_prob")])
def test_a_size_that_no_model_has_is_refused_before_anything_is_computed_with_it(tmp_path, field):
    with pytest.raises(UserError, match=rf"{field} is {10**30}; it must be a positive whole number of at most \d+$"):
        read(tmp_path, CONFIGS["qwen3_moe"], **{"num_experts": 8, "num_local_experts": None, field: 10**30})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; it must not exceed num_experts=8"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob is True with num_experts_per_tok=1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be"),
    ],
)
def test_impossible_expert_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        read(tmp_path, CONFIGS["qwen3_moe"], num_experts=8, **changes)


def test_all_problems_are_reported_at_once(tmp_path):
    with pytest.raises(UserError) as caught:
        read(tmp_path, CONFIGS["llama"], absent=("vocab_size",), hidden_act="gelu", use_sliding_window=True)

    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": ["qwen3"]}, r"model_type is \['qwen3'\]; it must be text"),
        ({"layer_types": 6}, "layer_types is 6; it must be a list"),
        ({"mlp_only_layers": -1}, "mlp_only_layers is -1; it must be a list"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]; it must be an object"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'; it must be a positive number"),
        ({"rope_parameters": YARN | {"factor": "x"}}, "rope_parameters.factor is 'x'; it must be a positive number"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(tmp_path, changes, problem):
    with pytest.raises(UserError, match=rf"config\.json: {problem}"):
        read(tmp_path, CONFIGS["qwen3_moe"], **changes)


def test_a_folder_without_config_names_the_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"config\.json does not exist; model\.path must be"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_a_config_that_is_not_json_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)

    with pytest.raises(UserError, match=r"config\.json must be (a )?JSON"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(("vocabulary", "ranks", "padded"), [(8, 1, 8), (8, 4, 8), (9, 4, 12), (151936, 7, 151942)])
def test_the_vocabulary_is_padded_to_the_next_multiple_of_the_ranks(tmp_path, vocabulary, ranks, padded):
    assert read(tmp_path, CONFIGS["llama"], vocab_size=vocabulary).padded_vocab_size(ranks) == padded
