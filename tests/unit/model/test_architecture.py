from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding, Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssRotaryEmbedding, GptOssTopKRouter
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding, Qwen3MoeTopKRouter
from transformers.models.seed_oss.modeling_seed_oss import SeedOssRotaryEmbedding

from megatron_bapo.config.architecture import FAMILIES, read_architecture
from megatron_bapo.config.model import ModelConfig
from megatron_bapo.config.pipeline_layers import stage_layers
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.architecture import rotary, transformer_config
from megatron_bapo.parallel.megatron import TransformerConfig
from tests.unit.model.shards import architecture

# Megatron-Core 0.16 warns about its own default.
pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
ROTARY = {
    "llama": (LlamaConfig, LlamaRotaryEmbedding),
    "mistral": (MistralConfig, MistralRotaryEmbedding),
    "seed_oss": (SeedOssConfig, SeedOssRotaryEmbedding),
    "qwen2": (Qwen2Config, Qwen2RotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeRotaryEmbedding),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeRotaryEmbedding),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeRotaryEmbedding),
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with every setting": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "attention_factor": 1.5,
        "truncate": False,
    },
    "yarn with two scales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize(
    ("family", "scaling"),
    [(family, scaling) for family in ROTARY for scaling in SCALINGS if family != "glm4_moe" or scaling == "default"],
)
def test_frequencies_and_their_factor_are_those_of_transformers(tmp_path, family, scaling):
    config_class, embedding_class = ROTARY[family]
    rope = {"rope_theta": 1e6, **SCALINGS[scaling]}
    config = config_class(**SHAPE, max_position_embeddings=131072, rope_parameters=rope, sliding_window=None)
    config.save_pretrained(tmp_path)

    frequencies, factor = rotary(read_architecture(tmp_path))

    reference = embedding_class(config)
    assert torch.equal(frequencies, reference.inv_freq)
    assert factor == reference.attention_scaling
    assert (factor != 1.0) == scaling.startswith("yarn")


@pytest.mark.parametrize("truncate", [True, False])
def test_gpt_oss_has_the_frequencies_of_transformers(tmp_path, truncate):
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    config = GptOssConfig(rope_parameters=rope | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": truncate})
    config.save_pretrained(tmp_path)

    frequencies, factor = rotary(read_architecture(tmp_path))

    reference = GptOssRotaryEmbedding(config)
    assert torch.equal(frequencies, reference.inv_freq)
    assert factor == reference.attention_scaling


@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_latent_attention_scales_rotated_dimensions_and_softmax_as_transformers_does(tmp_path, mscale):
    from megatron.core.models.common.embeddings import _yarn_get_mscale

    scaling = {**SCALINGS["yarn with two scales"], "mscale": mscale, "rope_theta": 1e4}
    router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    config = DeepseekV3Config(max_position_embeddings=163840, rope_parameters=scaling, **router)
    config.save_pretrained(tmp_path)
    arch = read_architecture(tmp_path)

    frequencies, factor = rotary(arch)
    megatron = transformer_config(
        arch, ModelConfig(path=Path("model"), dtype="float32"), ParallelConfig(), None, on_gpu=False
    )

    reference = DeepseekV3RotaryEmbedding(config)
    assert torch.equal(frequencies, reference.inv_freq)
    assert factor == reference.attention_scaling
    assert (factor == 1.0) == (mscale == 1.0)
    with torch.device("meta"):
        attention = DeepseekV3Attention(config, 0)
    scale = _yarn_get_mscale(megatron.rotary_scaling_factor, megatron.mscale_all_dim)
    assert scale**2 / arch.head_dim**0.5 == pytest.approx(attention.scaling, rel=1e-12)


def config_of(family: str, parallel: ParallelConfig | None = None, **changes: object) -> TransformerConfig:
    arch, model = architecture(family, **changes), ModelConfig(path=Path("model"), dtype="float32")
    return transformer_config(arch, model, parallel or ParallelConfig(), None, on_gpu=False)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_router_weights_experts_as_transformers_does(norm_topk_prob):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    config = config_of("qwen3_moe", num_experts=8, num_experts_per_tok=3, norm_topk_prob=norm_topk_prob)
    router = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=norm_topk_prob)
    )
    torch.nn.init.normal_(router.weight)
    logits, expected, chosen = router(torch.randn(50, 16))

    weights, is_chosen = topk_routing_with_score_function(
        logits,
        config.moe_router_topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        score_function=config.moe_router_score_function,
    )

    torch.testing.assert_close(weights, torch.zeros_like(weights).scatter(1, chosen, expected))
    assert is_chosen.sum(1).tolist() == [3] * 50
    assert config.moe_router_load_balancing_type == "none"


def test_a_router_with_a_bias_weights_experts_as_transformers_does():
    from megatron.core.transformer.moe.moe_utils import router_gating_linear, topk_routing_with_score_function

    config = config_of("gpt_oss", num_experts=8, num_experts_per_tok=3)
    router = GptOssTopKRouter(GptOssConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=3))
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.bias)
    hidden = torch.randn(50, 16)
    _, expected, chosen = router(hidden)

    logits = router_gating_linear(hidden, router.weight, router.bias, torch.float32)
    weights, _ = topk_routing_with_score_function(
        logits,
        config.moe_router_topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        score_function=config.moe_router_score_function,
    )

    torch.testing.assert_close(weights, torch.zeros_like(weights).scatter(1, chosen, expected))


def test_gpt_oss_computes_the_swiglu_of_transformers_also_where_it_is_clamped():
    config = config_of("gpt_oss")
    experts = GptOssExperts(GptOssConfig(hidden_size=16, intermediate_size=8, num_local_experts=2))
    both = 6 * torch.randn(200, 16)
    gate, up = both[..., 0::2], both[..., 1::2]
    limit = config.activation_func_clamp_value
    assert limit == 7.0
    assert (gate > limit).any()
    assert (up.abs() > limit).any()

    found = config.activation_func(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + config.glu_linear_offset)

    torch.testing.assert_close(found, experts._apply_gate(both))
    assert not config.bias_activation_fusion
    assert config.add_bias_linear


def test_windows_count_the_tokens_before_a_querys_own_and_sinks_are_learned():
    config = config_of("gpt_oss")
    assert (config.softmax_type, config.window_size, config.window_attn_skip_freq) == (
        "learnable",
        (2, 0),
        [1, 0, 1, 0],
    )
    others = [config_of(name) for name in FAMILIES if name != "gpt_oss"]
    assert {(other.softmax_type, other.window_size, other.add_bias_linear) for other in others} == {
        ("vanilla", None, False)
    }


@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2), (2, 2)])
def test_a_sigmoid_router_chooses_and_weights_experts_as_transformers_does(n_group, topk_group):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    groups, scale = {"n_group": n_group, "topk_group": topk_group}, {"routed_scaling_factor": 2.5}
    config = config_of("glm4_moe", num_experts=8, num_experts_per_tok=4, **groups, **scale)
    router = Glm4MoeTopkRouter(
        Glm4MoeConfig(hidden_size=16, n_routed_experts=8, num_experts_per_tok=4, norm_topk_prob=True, **groups, **scale)
    )
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(200, 16)
    _, _, unbiased = router(hidden)
    torch.nn.init.normal_(router.e_score_correction_bias, std=0.3)
    logits, expected, chosen = router(hidden)

    weights, is_chosen = topk_routing_with_score_function(
        logits,
        config.moe_router_topk,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
        expert_bias=router.e_score_correction_bias,
    )

    assert (chosen.sort(1).values != unbiased.sort(1).values).any()
    torch.testing.assert_close(weights, torch.zeros_like(weights).scatter(1, chosen, expected))
    assert is_chosen.sum(1).tolist() == [4] * 200
    assert config.moe_router_enable_expert_bias


def test_only_the_configured_layers_have_experts():
    config = config_of("qwen3_moe")

    assert config.num_moe_experts == 4
    assert config.moe_layer_freq == [1, 0, 1, 1]
    assert (config.moe_ffn_hidden_size, config.ffn_hidden_size) == (8, 24)


def test_families_with_a_shared_expert_have_it_and_qwens_its_gate():
    configs = {name: config_of(name) for name in FAMILIES}
    widths = {name: config.moe_shared_expert_intermediate_size for name, config in configs.items()}
    assert {name for name, width in widths.items() if width == 24} == {
        *("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"),
        *("glm4_moe", "deepseek_v3", "kimi_k2", "glm4_moe_lite"),
    }
    assert set(widths.values()) == {None, 24}
    gated = ["qwen2_moe", "qwen3_next", "qwen3_5_moe_text"]
    assert [name for name, config in configs.items() if config.moe_shared_expert_gate] == gated


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_dense_model_has_no_experts(family):
    assert config_of(family).num_moe_experts is None
    assert config_of("qwen3_moe", num_experts=0, moe_layers=frozenset()).num_moe_experts is None


def test_families_differ_in_biases_and_norms_of_queries():
    assert [(name, config_of(name).add_qkv_bias, config_of(name).qk_layernorm) for name in ROTARY] == [
        ("llama", False, False),
        ("mistral", False, False),
        ("seed_oss", True, False),
        ("qwen2", True, False),
        ("qwen3", False, True),
        ("qwen3_moe", False, True),
        ("qwen2_moe", True, False),
        ("glm4_moe", False, False),
    ]


def test_every_axis_of_the_layout_reaches_megatron():
    axes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 3,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    }
    config = config_of("qwen3_moe", ParallelConfig(world_size=24, sequence_parallel=True, **axes))

    assert {name: getattr(config, name) for name in axes} == axes
    assert config.sequence_parallel
    assert config.overlap_p2p_comm
    assert not config.batch_p2p_comm


def test_without_virtual_stages_the_plain_pipeline_schedule_stays():
    config = config_of("llama", ParallelConfig(world_size=2, pipeline_model_parallel_size=2))

    assert config.virtual_pipeline_model_parallel_size is None
    assert not config.overlap_p2p_comm


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (None, None, None)),
        ({"recompute_granularity": "full"}, ("full", "uniform", 1)),
        ({"recompute_granularity": "selective", "recompute_modules": ("mlp", "moe")}, ("selective", None, None)),
    ],
)
def test_recomputation_reaches_megatron(settings, expected):
    config = config_of("llama", ParallelConfig(**settings))

    assert (config.recompute_granularity, config.recompute_method, config.recompute_num_layers) == expected
    if "recompute_modules" in settings:
        assert config.recompute_modules == ["mlp", "moe"]


@pytest.mark.parametrize(
    ("first", "last", "vpp"), [(11, 11, 1), (None, 10, 1), (12, 10, 2), (24, 22, 2), (None, 10, 2)]
)
def test_the_layers_of_first_and_last_stage_are_divided_as_megatrons_own_keys_do(
    first: int | None, last: int | None, vpp: int
) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    pp = 4 if first == 24 else 8
    sizes = {"pipeline_model_parallel_size": pp, "virtual_pipeline_model_parallel_size": vpp}
    parallel = ParallelConfig(world_size=pp, pipeline_model_parallel_layout=(first, last), **sizes)
    arch = architecture("llama", num_hidden_layers=94)
    theirs = TransformerConfig(
        num_layers=94,
        hidden_size=16,
        num_attention_heads=8,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    for stage in range(pp):
        for index, layers in enumerate(stage_layers(arch, parallel, stage)):
            vp_stage = index if vpp > 1 else None
            offset = get_transformer_layer_offset(theirs, vp_stage, stage)
            assert layers == range(offset, offset + get_num_layers_to_build(theirs, vp_stage, stage))


def test_an_uneven_division_is_handed_to_megatron_and_an_even_one_leaves_its_default():
    sizes = {"world_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    listed = ParallelConfig(pipeline_model_parallel_layout=(2, 2, 2, 1), **sizes)
    layout: Any = config_of("llama", listed, num_hidden_layers=7).pipeline_model_parallel_layout
    even = config_of("llama", ParallelConfig(pipeline_model_parallel_layout="auto", **sizes), num_hidden_layers=4)

    assert config_of("llama", ParallelConfig(**sizes)).pipeline_model_parallel_layout is None
    assert even.pipeline_model_parallel_layout is None
    assert [[[layer.name for layer in chunk] for chunk in stage] for stage in layout.layout] == [
        [["embedding", "decoder", "decoder"], ["decoder", "decoder"]],
        [["decoder", "decoder"], ["decoder", "loss"]],
    ]
